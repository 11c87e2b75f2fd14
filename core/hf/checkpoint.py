"""Reads one expert at a time from a checkpoint on disk, whatever its layout there.

transformers' own conversion mapping defines which checkpoint tensors make up a parameter and how they are merged; it is
run here on a single expert's tensors instead of all of them. Verified bit for bit against a plain load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from core.errors import ModelError
from core.hf.adapters.expert_attributes import CONVERSIONS, ROWS, STORED
from core.hf.coded import Merger
from core.hf.discover import find_experts
from core.hf.files import ModelFiles, ModelPath, check_model, content_hash
from core.hf.safetensors_file import TensorFiles
from core.hf.tensors import Tensors
from core.memory.codec import PartSpec
from core.memory.codec.coded import QuantizedTensor

NUMBERED = re.compile(r"(?P<before>(?:[^.]+\.)*?)(?P<number>\d{1,9})(?P<after>\..*)")
"""A tensor's name around the first number in it, which is that of its layer."""
AHEAD = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|nextn|mtp)\b")
"""What only layers that predict further tokens have."""
COUNTED = re.compile(r"(\D*)(\d+)")
"""The part of a name that tells one expert from another: "3", or "expert_3"."""
CODED = re.compile(
    r"(?P<of>.+)[._](scales?|scale_inv|scale_\d+|global_scale|biases|q?zeros|zero_points?|(nested_)?absmax|"
    r"(nested_)?quant_map|SCB|codebooks?|g_idx|quant_state\..+)"
)
"""Names of what a quantized weight is computed from besides its codes, around the weight's or its module's name."""
REMEDY = "Download config.json again, or use the original model."
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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

    def __init__(self, model: nn.Module, checkpoint: ModelPath | Tensors) -> None:
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
        mapping = [*get_model_conversion_mapping(self._model), *getattr(self.sites[0].module, CONVERSIONS, ())]
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
            if target in real and self._stored.tensors[key].dtype not in PLAIN:
                raise ModelError(
                    f"The checkpoint holds {key!r} as {str(self._stored.tensors[key].dtype).removeprefix('torch.')}, "
                    f"codes for which its settings name no quantization. {REMEDY}"
                )
            if target in experts:
                recipe = recipes.setdefault(target, StackRecipe(by_pattern.get(pattern), {}))
                recipe.keys.setdefault(pattern or key, []).append(key)
                if rows and isinstance(self._stored, TensorFiles):
                    self._stored.stack(key, rows)
            elif target in known:
                self._dense[key] = target
                if pattern is None:
                    self._check_shape(key, target, shapes.get(target))
            else:
                unused[key] = target
        self.unused = tuple(unused)
        self._check_layers(unused, known)
        self._check_coded(unused, recipes)
        for target, count in experts.items():
            self._check(target, count, recipes.get(target))
        return recipes

    def _check_shape(self, key: str, target: str, wanted: tuple[int, ...] | None) -> None:
        shape = tuple(self._stored.tensors[key].shape)
        if wanted is not None and shape != wanted:
            raise ModelError(
                f"The checkpoint holds {key!r} in the shape {shape}, but by config.json {target!r} has "
                f"the shape {wanted}. They are not of the same model: download it again."
            )

    def _check_coded(self, unused: Iterable[str], recipes: Mapping[str, StackRecipe]) -> None:
        """Raises ModelError when a tensor that nothing reads says how a weight that is read was quantized."""
        read = {*self._dense, *(key for each in recipes.values() for keys in each.keys.values() for key in keys)}
        for key in unused:
            if (found := CODED.fullmatch(key)) is None:
                continue
            weight = next((one for one in (found["of"], f"{found['of']}.weight") if one in read), None)
            if weight is not None:
                raise ModelError(
                    f"The checkpoint holds {key!r}, so {weight!r} is stored as codes, for which its settings name no "
                    f"quantization. {REMEDY}"
                )

    def _check_layers(self, unused: Mapping[str, str], known: Mapping[str, object]) -> None:
        """Raises ModelError when the checkpoint has layers that config.json omits, except multi-token prediction
        layers, which transformers' models do not have."""
        last: dict[str, int] = {}
        for name in known:
            if at := NUMBERED.fullmatch(name):
                last[at["before"]] = max(int(at["number"]), last.get(at["before"], 0))
        ahead = {
            (at["before"], at["number"]) for key in unused if AHEAD.search(key) and (at := NUMBERED.fullmatch(key))
        }
        for key, name in unused.items():
            at = NUMBERED.fullmatch(name)
            if at is None or int(at["number"]) <= last.get(at["before"], int(at["number"])):
                continue
            alike = any(f"{at['before']}{n}{at['after']}" in known for n in range(last[at["before"]] + 1))
            stored = NUMBERED.fullmatch(key)
            if alike and (stored is None or (stored["before"], stored["number"]) not in ahead):
                raise ModelError(
                    f"The checkpoint holds weights of layer {at['number']} ({key!r}), but by config.json "
                    f"the model ends with layer {last[at['before']]}. Download config.json again."
                )

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
            if not _counted(keys):
                raise ModelError(
                    f"The experts' weights from {keys[0]!r} to {keys[-1]!r} are not numbered one by one from 0 on. "
                    "Download the model again."
                )
        site, _, part = target.rpartition(".")
        spec = next(s.parts[part] for s in self.sites if s.name == site)
        for keys in recipe.keys.values():
            shape = self._stored.tensors[keys[0]].shape
            odd = next((key for key in keys[:experts] if self._stored.tensors[key].shape != shape), None)
            if odd is not None:
                raise ModelError(
                    f"The experts' weights {keys[0]!r} and {odd!r} are of different shapes, {shape} and "
                    f"{self._stored.tensors[odd].shape}. Download the model again."
                )
        try:
            made = tuple(
                self._merge(
                    target,
                    {
                        pattern: torch.empty(
                            (1, *self._stored.tensors[name].shape[1:])
                            if row is not None
                            else self._stored.tensors[name].shape,
                            device="meta",
                        )
                        for pattern, (name, row) in self._parts_of(recipe, experts, 0).items()
                    },
                    recipe,
                ).shape
            )
        except (RuntimeError, IndexError, ValueError) as error:
            raise ModelError(
                f"The checkpoint's weights of {target!r} do not fit together: {error}. Download it again."
            ) from None
        if made != spec.shape:
            raise ModelError(
                f"An expert of {target!r} has the shape {made} in the checkpoint, but {spec.shape} by "
                "config.json. They are not of the same model: download it again."
            )


def _counted(keys: Sequence[str]) -> bool:
    """Whether the names of experts' tensors differ in one part alone, which counts from 0 on."""
    parts = [key.split(".") for key in keys]
    if len(keys) == 1 or len({len(part) for part in parts}) > 1:
        return len(keys) == 1
    differing = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    found = [COUNTED.fullmatch(part) for column in differing for part in column]
    counts = [(one[1], int(one[2])) for one in found if one is not None]
    return counts == [(counts[0][0], at) for at in range(len(keys))] if counts else False
