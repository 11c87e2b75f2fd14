"""Read one expert at a time from a checkpoint on disk, whatever its layout there.

Which checkpoint tensors make up a parameter, and how they are merged, is transformers' own conversion mapping; it is
run here on a single expert's tensors instead of all of them. Verified bit for bit against a plain load.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from core.errors import ModelError
from core.hf.discover import find_experts
from core.hf.files import ModelPath, TensorFiles, check_model, content_hash


class Source(NamedTuple):
    """Where a stacked parameter comes from: checkpoint tensors by pattern, in expert order, and how they are merged."""

    converter: Any                   # transformers' WeightConverter; None: the tensor is stored as the model wants it
    keys: dict[str, list[str]]


class CheckpointReader:
    """Reads experts lazily. `model` is a skeleton or a meta model of the same checkpoint.

    Thread-safe. Owns open files until `close`; after that they can be deleted, on Windows too.
    Raises ModelError when the checkpoint lacks an expert's weights.
    """

    def __init__(self, model: nn.Module, path: ModelPath) -> None:
        self._files = check_model(path)
        self._model: Any = model
        self.sites = find_experts(model)
        self._stored = TensorFiles(self._files.weights)
        try:
            self._sources = self._index()
        except BaseException:
            self._stored.close()
            raise

    def read(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """One expert's parts in the model's own layout and the checkpoint's dtype, as new CPU tensors.

        `layer` counts MoE layers. Raises IndexError for an expert that does not exist.
        """
        site = self.sites[layer]
        if not 0 <= expert < site.num_experts:
            raise IndexError(f"layer {layer} has no expert {expert}")
        return {part: self._part(f"{site.name}.{part}", site.num_experts, expert) for part in site.parts}

    def content_hash(self) -> str:
        """The model's identity: see `files.content_hash`."""
        return content_hash(self._files)

    def close(self) -> None:
        self._stored.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _part(self, target: str, experts: int, expert: int) -> torch.Tensor:
        source = self._sources[target]
        tensors: dict[str, Any] = {}
        for pattern, keys in source.keys.items():
            if len(keys) == experts:                      # one checkpoint tensor per expert
                tensors[pattern] = [self._stored.read(keys[expert])]
            else:                                         # all experts stacked in one: take its row
                tensors[pattern] = [self._stored.read(keys[0], expert)]
        if source.converter is None:
            return next(iter(tensors.values()))[0].squeeze(0)  # type: ignore[no-any-return]
        converter = source.converter
        for operation in converter.operations:
            tensors = operation.convert(tensors, source_patterns=converter.source_patterns,
                                        target_patterns=converter.target_patterns, full_layer_name=target,
                                        model=self._model, config=self._model.config, missing_keys=None)
        merged = next(value for name, value in tensors.items() if name in target)
        tensor: torch.Tensor = merged[0] if isinstance(merged, list) else merged
        return tensor.squeeze(0)

    def _index(self) -> dict[str, Source]:
        """Map every checkpoint tensor to the expert parameter it feeds, as transformers' loader would."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [w for w in mapping if isinstance(w, WeightRenaming)]
        converters = [w for w in mapping if isinstance(w, WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        experts = {f"{s.name}.{part}": s.num_experts for s in self.sites for part in s.parts}
        known = dict.fromkeys((*self._model.state_dict(), *experts), True)
        prefix = self._model.base_model_prefix
        sources: dict[str, Source] = {}
        for key in sorted(self._stored.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if target not in known and key in known:
                target, pattern = key, None
            if target in experts:
                source = sources.setdefault(target, Source(by_pattern.get(pattern), {}))
                source.keys.setdefault(pattern or key, []).append(key)
        for target, count in experts.items():
            self._check(target, count, sources.get(target))
        return sources

    def _check(self, target: str, experts: int, source: Source | None) -> None:
        wanted = 1 if source is None or source.converter is None else len(source.converter.source_patterns)
        whole = source is not None and len(source.keys) == wanted and all(
            len(keys) == experts or (len(keys) == 1 and self._stored.tensors[keys[0]].shape[:1] == (experts,))
            for keys in source.keys.values())
        if not whole:
            raise ModelError(f"The checkpoint in {self._files.path} lacks weights of {target!r}, or stores them in "
                             "a way that Moestro does not know. Download it again, or choose another model.")
