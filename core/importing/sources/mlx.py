"""MLX: `weight` uint32 [out, in * bits / 32], codes of `bits` bits one after the other, the lowest first, with `scales`
and `biases` [out, in / group]: weight = code * scale + bias. In the modes mxfp4 and nvfp4 scales are bytes, without
biases.

mlx-lm stacks experts under names of its own (`switch_mlp`), which is undone here for architectures of which it changes
nothing else.
"""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, rows, stored
from core.memory.codec.coded import QuantizedTensor

READ = ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe")
STACK = ".switch_mlp."
MODES = {"mxfp4": (32, torch.uint8), "nvfp4": (16, torch.float8_e4m3fn)}
AFFINE = {(4, 32): "int4-g32", (4, 64): "int4-g64", (4, 128): "int4-g128", (3, 64): "int3", (2, 64): "int2"}
"""Formats of codes with a scale and a zero point, by bits and group."""


class MlxMatrix(QuantizedWeight):
    """One weight, or one of stacked experts."""

    def __init__(self, files: TensorFiles, prefix: str, group: int, mode: str, expert: int | None) -> None:
        self._files, self._prefix, self._mode, self._expert = files, prefix, mode, expert
        packed, scales = (
            stored(files, f"{prefix}.{part}", prefix)[expert is not None :] for part in ("weight", "scales")
        )
        self._group = MODES[mode][0] if mode in MODES else group
        self.scales = mode, self._group
        self.shape = (packed[0], scales[-1] * self._group)
        self.bits = 32 * packed[-1] // max(1, self.shape[1])
        affine = mode not in MODES
        if (
            len(packed) != 2
            or scales[:-1] != packed[:1]
            or 32 * packed[1] != self.bits * self.shape[1]
            or not 2 <= self.bits <= 8
            or files.tensors[f"{prefix}.weight"].dtype != torch.uint32
            or (affine and stored(files, f"{prefix}.biases", prefix)[expert is not None :] != scales)
            or (not affine and (self.bits != 4 or files.tensors[f"{prefix}.scales"].dtype != torch.uint8))
        ):
            raise mismatch(prefix, f"scales {scales} of groups of {group} do not fit codes {packed}")

    def read(self, row: int | None) -> torch.Tensor:
        codes = self._codes()
        if self._mode in MODES:
            return self._floats(codes, row).dequantized()
        scale, bias = (self._part(part).float()[..., None] for part in ("scales", "biases"))
        grouped = codes.view(*scale.shape[:-1], self._group).float()
        return rows(torch.addcmul(bias, grouped, scale).view(self.shape), row)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        if self._mode in MODES:
            return self._floats(self._codes(), row)
        format, scale = AFFINE.get((self.bits, self._group)), self._part("scales")
        bias, middle = self._part("biases").double(), 1 << self.bits - 1
        zero = (bias + middle * scale.double()).float()
        if format is None or not torch.equal(zero.double() - middle * scale.double(), bias):  # it was rounded
            return None
        return QuantizedTensor(format, *(rows(t, row) for t in (self._codes(), scale, zero)))

    def _floats(self, codes: torch.Tensor, row: int | None) -> QuantizedTensor:
        scale = rows(self._part("scales").view(MODES[self._mode][1]), row)
        each = torch.ones(len(scale), 1) if self._mode == "nvfp4" else None
        return QuantizedTensor(self._mode, rows(codes, row), scale, None, each)

    def _part(self, part: str) -> torch.Tensor:
        found = self._files.read(f"{self._prefix}.{part}", self._expert)
        return found if self._expert is None else found[0]

    def _codes(self) -> torch.Tensor:
        """uint8 [out, in]: eight codes are in `bits` bytes."""
        raw = self._part("weight").contiguous().view(torch.uint8).view(self.shape[0], -1, self.bits).to(torch.int64)
        whole = sum(raw[..., i] << 8 * i for i in range(1, self.bits)) + raw[..., 0]
        mask = (1 << self.bits) - 1
        return torch.stack([(whole >> self.bits * i & mask).to(torch.uint8) for i in range(8)], -1).view(self.shape)


def matrices(files: TensorFiles, settings: dict[str, Any], model_type: str) -> Matrices:
    """(weights by name, their stored tensors, a label). Raises ModelError for what MLX changes in other ways."""
    if model_type not in READ:
        raise ModelError(
            f"This is an MLX checkpoint of the type {model_type!r:.60}. MLX renames and rearranges weights, which is "
            f"undone only for {', '.join(READ)}. Use the original model, which can be rounded here when it is "
            "imported, or a GGUF version of it."
        )
    usual = str(settings.get("mode", "affine"))
    found: dict[str, QuantizedWeight] = {}
    taken: list[str] = []
    for name in files.tensors:
        if not name.endswith(".scales"):
            continue
        prefix = name.removesuffix(".scales")
        own = settings.get(prefix)
        own = own if isinstance(own, dict) else {}
        group, mode = own.get("group_size", settings.get("group_size", 64)), str(own.get("mode", usual))
        if type(group) is not int:
            raise mismatch(prefix, f"groups of {group!r:.40}")
        if mode not in (*MODES, "affine"):
            raise mismatch(prefix, f"the mode {mode!r:.40}")
        before, stack, part = prefix.partition(STACK)
        if stack:
            for expert in range(stored(files, f"{prefix}.weight", prefix)[0]):
                one = MlxMatrix(files, prefix, group, mode, expert)
                found[f"{before}.experts.{expert}.{part}.weight"] = one
        else:
            found[f"{prefix}.weight"] = MlxMatrix(files, prefix, group, mode, None)
        taken += [f"{prefix}.{one}" for one in ("weight", "scales", "biases")]
    label = f"MLX {settings.get('bits', '?')!s:.9}-bit"
    return found, taken, label if usual == "affine" else f"MLX {usual.upper()}"
