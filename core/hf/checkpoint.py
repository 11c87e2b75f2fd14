"""Reads one expert at a time from a checkpoint on disk, whatever its layout there.

transformers' own conversion mapping defines which checkpoint tensors make up a parameter and how they are merged; it is
run here on a single expert's tensors instead of all of them. Verified bit for bit against a plain load.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from core.errors import ModelError
from core.hf.checkpoint_checks import check_coded, check_experts, check_layers, check_plain, check_shape
from core.hf.coded import Merger
from core.hf.discover import find_experts
from core.hf.expert_attributes import CONVERSIONS, ROWS, STORED
from core.hf.files import ModelFiles, ModelPath, check_model, content_hash
from core.hf.head import has_attached, stored_names
from core.hf.safetensors_file import TensorFiles
from core.hf.tensors import Tensors
from core.memory.codec import PartSpec
from core.memory.codec.coded import QuantizedTensor


class StackRecipe(NamedTuple):
    """Source of a stacked parameter: checkpoint tensors by pattern, in expert order, and how they are merged."""

    converter: Any  # transformers' WeightConverter; None: stored in the model's own layout
    keys: dict[str, list[str]]


class _One:
    """Stand-in for the model during a conversion: has every expert parameter's shape, with a single expert."""

    def __init__(self, parts: Mapping[str, PartSpec]) -> None:
        self._parts = parts

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(1, *self._parts[name.rpartition(".")[2]].shape, device="meta")

    get_parameter_or_buffer = get_parameter


class CheckpointReader:
    """Reads experts lazily. `model` is a skeleton or a meta model of the same checkpoint; the checkpoint is a model
    directory or any `Tensors`, which this reader then owns.

    Thread-safe. Owns open files until `close`; after that they can be deleted, on Windows too. Raises ModelError when
    the checkpoint lacks an expert's weights.
    """

    def __init__(self, model: nn.Module, checkpoint: ModelPath | Tensors, *, keep_open: bool = False) -> None:
        """`keep_open`: `Tensors` whose weights the model does not go with stay open, for another try."""
        self._model: Any = model
        self.sites = find_experts(model)
        self._files: ModelFiles | None = None
        if isinstance(checkpoint, str | os.PathLike | ModelFiles):
            self._files = check_model(checkpoint)
            checkpoint = TensorFiles(self._files.weights)
        self._stored: Tensors = checkpoint
        self._dense: dict[str, str] = {}  # checkpoint key -> parameter
        self.unused: tuple[str, ...] = ()  # the checkpoint's tensors that the model does not have
        self._merger = Merger()
        try:
            self._recipes = self._index()
        except BaseException:
            if not keep_open:
                self._stored.close()
            raise

    def read(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """One expert's parts in the model's own layout and the checkpoint's dtype (fp32 where dequantised), as new CPU
        tensors. `layer` counts MoE layers. Raises IndexError for an expert that does not exist.
        """
        return {part: self._part(target, expert) for part, target in self._targets(layer, expert).items()}

    def read_coded(self, layer: int, expert: int) -> dict[str, QuantizedTensor | torch.Tensor]:
        """As `read`, but returns codes where the checkpoint stores codes that one of our formats can hold."""
        parts: dict[str, QuantizedTensor | torch.Tensor] = {}
        for part, target in self._targets(layer, expert).items():
            coded = self._coded(part, target, expert)
            if coded is not None and self.sites[layer].is_transposed and coded.scale.shape[-1] != coded.codes.shape[-1]:
                coded = None  # its groups are of outputs: those of our formats are of inputs
            parts[part] = self._part(target, expert) if coded is None else coded
        return parts

    def names_of(self, layer: int, expert: int, part: str) -> list[str]:
        """The checkpoint's tensors that a part of an expert is made of."""
        return [name for name, _ in self._ingredients(self._targets(layer, expert)[part], expert).values()]

    def dense_names(self) -> list[str]:
        """The checkpoint's non-expert tensors that the model needs, in order. Of tied weights stored twice with equal
        values, only one: transformers ties them again."""
        tied = self._model.all_tied_weights_keys
        keys = {target: key for key, target in self._dense.items()}
        double = {
            keys[target]
            for target, source in tied.items()
            if target in keys
            and source in keys
            and torch.equal(self._stored.read(keys[target]), self._stored.read(keys[source]))
        }
        return [key for key in self._dense if key not in double]

    def lacking(self, prefix: str) -> list[str]:
        """The model's parameters of these names, experts' apart, that the checkpoint has no weights for."""
        read, state = {*self._dense.values(), *self._recipes}, self._model.state_dict()
        return [name for name in state if name.startswith(prefix) and name not in read]

    def content_hash(self) -> str:
        """The model's identity: see `files.content_hash`. Raises ModelError unless opened from a model directory."""
        if self._files is None:
            raise ModelError("This checkpoint was not opened as a model directory: its source knows its identity.")
        return content_hash(self._files)

    def close(self) -> None:
        self._stored.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _targets(self, layer: int, expert: int) -> dict[str, str]:
        """Part -> name of the stacked parameter that contains it as a row."""
        site = self.sites[layer]
        if not 0 <= expert < site.num_experts:
            raise IndexError(f"layer {layer} has no expert {expert}")
        return {part: f"{site.name}.{part}" for part in site.parts}

    def _ingredients(self, target: str, expert: int) -> dict[str, tuple[str, int | None]]:
        """Sources of one expert's row of a parameter: by pattern, the tensor's name and its row (None: all)."""
        return self._parts_of(self._recipes[target], self.sites[0].num_experts, expert)

    @staticmethod
    def _parts_of(recipe: StackRecipe, experts: int, expert: int) -> dict[str, tuple[str, int | None]]:
        return {
            pattern: (keys[expert], None) if len(keys) == experts or len(keys) > 1 else (keys[0], expert)
            for pattern, keys in recipe.keys.items()
        }

    def _part(self, target: str, expert: int) -> torch.Tensor:
        tensors = {
            pattern: self._stored.read(name, row) for pattern, (name, row) in self._ingredients(target, expert).items()
        }
        return self._merge(target, tensors, self._recipes[target])

    def _coded(self, part: str, target: str, expert: int) -> QuantizedTensor | None:
        codes: dict[str, QuantizedTensor] = {}
        recipe = self._recipes[target]
        for pattern, (name, row) in self._ingredients(target, expert).items():
            coded = self._stored.coded(name, row)
            if coded is None:
                return None
            codes[pattern] = coded
        return self._merger.merge(codes, lambda tensors: self._merge(target, tensors, recipe), part)

    def _merge(self, target: str, ingredients: dict[str, torch.Tensor], recipe: StackRecipe) -> torch.Tensor:
        """Run the conversion on one expert's tensors."""
        converter = recipe.converter
        if converter is None:
            return next(iter(ingredients.values())).squeeze(0)
        halves = len(converter.target_patterns)  # if several: this expert's, then one for each other target
        tensors: dict[str, Any] = {pattern: [tensor] * halves for pattern, tensor in ingredients.items()}
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=_One(self.sites[0].parts),
                config=self._model.config,
                missing_keys=None,
            )
        merged = next(value for name, value in tensors.items() if name in target)
        tensor: torch.Tensor = merged[0] if isinstance(merged, list) else merged
        return tensor.squeeze(0)

    def _index(self) -> dict[str, StackRecipe]:
        """Map every checkpoint tensor to the parameter it feeds, as transformers' loader does."""
        names = stored_names(self._model.config) if has_attached(self._model) else None
        mapping = [*get_model_conversion_mapping(self._model, names), *getattr(self.sites[0].module, CONVERSIONS, ())]
        rows = getattr(self.sites[0].module, ROWS, 0)
        renamings = [w for w in mapping if isinstance(w, WeightRenaming)]
        converters = [w for w in mapping if isinstance(w, WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        experts = {f"{s.name}.{part}": s.num_experts for s in self.sites for part in s.parts}
        state = self._model.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        real = {*experts, *(name for name, tensor in state.items() if tensor.is_floating_point())}
        known = dict.fromkeys((*shapes, *experts), True)
        prefix = self._model.base_model_prefix
        recipes: dict[str, StackRecipe] = {}
        unused: dict[str, str] = {}
        for key in sorted(self._stored.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if target not in known and key in known:
                target, pattern = key, None
            if target in real:
                check_plain(key, self._stored.tensors[key].dtype)
            if target in experts:
                recipe = recipes.setdefault(target, StackRecipe(by_pattern.get(pattern), {}))
                recipe.keys.setdefault(pattern or key, []).append(key)
                if rows and isinstance(self._stored, TensorFiles):
                    self._stored.stack(key, rows)
            elif target in known:
                self._dense[key] = target
                if pattern is None:
                    check_shape(key, self._stored.tensors[key].shape, target, shapes.get(target))
            else:
                unused[key] = target
        self.unused = tuple(unused)
        check_layers(unused, known)
        of_experts = (key for recipe in recipes.values() for keys in recipe.keys.values() for key in keys)
        check_coded(unused, {*self._dense, *of_experts})
        for target, count in experts.items():
            self._check(target, count, recipes.get(target))
        return recipes

    def _check(self, target: str, experts: int, recipe: StackRecipe | None) -> None:
        wanted = 1 if recipe is None or recipe.converter is None else len(recipe.converter.source_patterns)
        counts = (experts, *getattr(self.sites[0].module, STORED, ()))
        whole = (
            recipe is not None
            and len(recipe.keys) == wanted
            and all(
                len(keys) in counts or (len(keys) == 1 and (*self._stored.tensors[keys[0]].shape, 0)[0] in counts)
                for keys in recipe.keys.values()
            )
        )
        if not whole:
            raise ModelError(
                f"The checkpoint lacks weights of {target!r}, or stores them in a way that Moestro does "
                "not know. Download it again, or choose another model."
            )
        assert recipe is not None
        for keys in recipe.keys.values():
            check_experts(keys, experts, [self._stored.tensors[key].shape for key in keys])
        site, _, part = target.rpartition(".")
        spec = next(s.parts[part] for s in self.sites if s.name == site)
        rows = {
            pattern: (1, *shape[1:]) if row is not None else shape
            for pattern, (name, row) in self._parts_of(recipe, experts, 0).items()
            for shape in (self._stored.tensors[name].shape,)
        }
        try:
            empty = {pattern: torch.empty(shape, device="meta") for pattern, shape in rows.items()}
            made = tuple(self._merge(target, empty, recipe).shape)
        except (RuntimeError, IndexError, ValueError) as error:
            raise ModelError(
                f"The checkpoint's weights of {target!r} do not fit together: {error}. Download it again."
            ) from None
        if made != spec.shape:
            raise ModelError(
                f"An expert of {target!r} has the shape {made} in the checkpoint, but {spec.shape} by "
                "config.json. They are not of the same model: download it again."
            )
