"""compressed-tensors (llm-compressor): integers packed in words (`weight_packed`), whole bytes, or 8-bit floats.

A module's storage is recognised from its tensors, so `targets` and `ignore` need not be matched; only the number of
bits is read from the config, and in mixed checkpoints follows from `weight_shape`.
"""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, stored
from core.importing.sources.fp8 import FLOATS, Fp8Matrix
from core.importing.sources.integers import IntegerMatrix, Integers, order_of, unpacked
from core.importing.sources.mxfp4 import PackedMxfp4Matrix
from core.importing.sources.nvfp4 import Nvfp4Matrix

READ = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
PARTS = ("packed", "scale", "shape", "zero_point", "g_idx")
INPUTS = ("input_scale", "input_global_scale", "k_scale", "v_scale")  # of activations, which are not rounded here


class PackedMatrix(IntegerMatrix):
    """`weight_packed` int32 [out, in * bits / 32], codes plus 2 ** (bits - 1); `weight_zero_point` packed along out."""

    symmetric = True

    def __init__(self, files: TensorFiles, prefix: str, bits: int, grouped: set[int]) -> None:
        """`bits` of a code, 0: of several numbers. `grouped`: the ones that have scales of groups, not of rows."""
        self._files, self._prefix = files, prefix
        (out, words), scale = (stored(files, f"{prefix}.weight_{p}", prefix) for p in ("packed", "scale"))
        columns = words * 32 // bits if bits else self._columns()
        self.bits = bits or words * 32 // columns
        self.by_row = self.bits not in grouped
        self.shape = (out, columns)
        if self.bits not in (4, 8):
            raise mismatch(prefix, f"compressed-tensors of {self.bits} bits is not read, only of 4 and of 8")
        if words * 32 != columns * self.bits or len(scale) != 2 or scale[0] != out:
            raise mismatch(prefix, f"scales {scale} do not fit packed codes {(out, words)}")
        self.scales = self.groups = scale[1]

    def _columns(self) -> int:
        stored(self._files, f"{self._prefix}.weight_shape", self._prefix)
        return int(self._files.read(f"{self._prefix}.weight_shape").tolist()[-1])

    def unpack(self) -> Integers:
        packed, scale, _, zero, index = (
            self._files.read(name) if (name := f"{self._prefix}.weight_{part}") in self._files.tensors else None
            for part in PARTS
        )
        assert packed is not None and scale is not None
        points = None
        if zero is not None and zero.dtype == torch.int32:
            points = unpacked(zero.t(), self.bits).t()[: self.shape[0]].to(torch.int16)
        elif zero is not None:
            points = zero.to(torch.int16) + (1 << self.bits - 1)
        order = None if index is None else order_of(index, self.groups)
        return Integers(self.bits, unpacked(packed, self.bits), scale.contiguous(), points, order)


class ByteMatrix(IntegerMatrix):
    """`weight` int8 [out, in] with one `weight_scale` per tensor, row or group."""

    bits, symmetric = 8, True

    def __init__(self, files: TensorFiles, prefix: str, by_row: bool) -> None:
        self._files, self._prefix, self.by_row = files, prefix, by_row
        self.shape = files.tensors[f"{prefix}.weight"].shape
        scale = stored(files, f"{prefix}.weight_scale", prefix)
        self._grid = scale if len(scale) == 2 else (self.shape[0] if torch.Size(scale).numel() > 1 else 1, 1)
        self.scales = self._grid
        if self._grid[0] not in (1, self.shape[0]) or self.shape[1] % self._grid[1]:
            raise mismatch(prefix, f"scales {scale} do not fit codes {self.shape}")

    def unpack(self) -> Integers:
        codes = self._files.read(f"{self._prefix}.weight").view(torch.uint8) ^ 0x80
        scale = self._files.read(f"{self._prefix}.weight_scale").view(self._grid).expand(self.shape[0], -1).contiguous()
        points = None
        if f"{self._prefix}.weight_zero_point" in self._files.tensors:
            points = self._files.read(f"{self._prefix}.weight_zero_point").to(torch.int16) + 128
            points = points.view(-1, scale.shape[1]).expand_as(scale)
        return Integers(8, codes, scale, points, None)


def matrices(files: TensorFiles, config: dict[str, Any], dtype: torch.dtype) -> Matrices:
    """Raises ModelError for unsupported variants."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
    kinds = {str(k) for k in (config.get("format"), *(g.get("format") for g in groups)) if k}
    sparse = str((config.get("sparsity_config") or {}).get("format") or "dense")
    transforms = (config.get("transform_config") or {}).get("config_groups")
    wrong = sorted(kinds - set(READ)) or [sparse][: sparse != "dense"] or ["transformed"][: bool(transforms)]
    if wrong:
        raise ModelError(
            f"This compressed-tensors checkpoint is in the format {wrong[0]!r}, which is not read. Use a "
            f"version in {', '.join(READ[:3])}, {READ[3]} or {READ[5]}, or the original model."
        )
    weights = [w for w in (g.get("weights") for g in groups) if isinstance(w, dict)]
    bits = {int(w.get("num_bits", 0)) for w in weights if w.get("type", "int") == "int"}
    block = next((tuple(w["block_structure"]) for w in weights if w.get("block_structure")), None)
    grouped = {int(w.get("num_bits", 0)) for w in weights if (w.get("group_size") or -1) > 0}
    found: dict[str, QuantizedWeight] = {}
    for name, at in files.tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "weight_packed" and f"{prefix}.weight_global_scale" in files.tensors:
            names = name, f"{prefix}.weight_scale", f"{prefix}.weight_global_scale"
            found[f"{prefix}.weight"] = Nvfp4Matrix(files, *names, divides=True)
        elif last == "weight_packed" and at.dtype == torch.uint8:
            found[f"{prefix}.weight"] = PackedMxfp4Matrix(files, prefix)
        elif last == "weight_packed":
            found[f"{prefix}.weight"] = PackedMatrix(files, prefix, min(bits) if len(bits) == 1 else 0, grouped)
        elif last == "weight" and at.dtype in FLOATS:
            stored(files, f"{name}_scale", name)
            found[name] = Fp8Matrix(files, name, f"{name}_scale", block if block and len(block) == 2 else None, dtype)
        elif last == "weight" and at.dtype == torch.int8:
            found[name] = ByteMatrix(files, prefix, 8 not in grouped)
    taken = [f"{name}_{part}" for name in found for part in (*PARTS, "global_scale")]
    taken += [f"{name.removesuffix('weight')}{part}" for name in found for part in INPUTS]
    return found, taken, _label(weights)


def _label(weights: list[dict[str, Any]]) -> str:
    kinds = dict.fromkeys(f"{'FP' if w.get('type') == 'float' else 'INT'}{w.get('num_bits')}" for w in weights)
    groups = dict.fromkeys(f"groups of {w['group_size']}" for w in weights if (w.get("group_size") or -1) > 0)
    return ", ".join((f"compressed-tensors {' + '.join(kinds)}", *groups))
