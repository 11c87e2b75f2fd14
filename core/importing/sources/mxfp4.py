"""MXFP4: 4-bit float codes, two per byte with the even input in the low half, and one exponent per 32.

gpt-oss: `NAME_blocks [experts, out, in / 32, 16]` and `NAME_scales [experts, out, in / 32]`, exponents of 2 plus 127;
the model's own parameter NAME is [experts, in, out]. compressed-tensors: one matrix at a time, not transposed.
"""

from typing import Any

import torch

from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, stored
from core.memory.codec.coded import QuantizedTensor

GROUP = 32


class Mxfp4Matrix(QuantizedWeight):
    """Stacked experts, transposed: the model's layout is [in, out]."""

    def __init__(self, files: TensorFiles, name: str) -> None:
        self._files, self._name = files, name
        blocks, scales = (stored(files, f"{name}_{s}", name) for s in ("blocks", "scales"))
        sizes = {files.tensors[f"{name}_{s}"].dtype.itemsize for s in ("blocks", "scales")}
        if blocks[3:] != (GROUP // 2,) or scales != blocks[:3] or sizes != {1}:
            raise mismatch(name, f"scales {scales} do not fit blocks {blocks}")
        self.shape = (blocks[0], blocks[2] * GROUP, blocks[1])

    def read(self, row: int | None) -> torch.Tensor:
        return self._rows(row).dequantized().transpose(1, 2).contiguous()

    def coded(self, row: int | None) -> QuantizedTensor:
        coded = self._rows(row).turned()
        return QuantizedTensor(coded.format, coded.codes.contiguous(), coded.scale.contiguous(), None)

    def _rows(self, row: int | None) -> QuantizedTensor:
        """[experts, out, in], as stored."""
        codes = halves(self._files.read(f"{self._name}_blocks", row)).flatten(2)
        return QuantizedTensor("mxfp4", codes, self._files.read(f"{self._name}_scales", row), None)


class PackedMxfp4Matrix(QuantizedWeight):
    """The layout of compressed-tensors and Quark, one matrix each: codes `weight_packed` or `weight [out, in / 2]`,
    `weight_scale [out, in / 32]`."""

    def __init__(self, files: TensorFiles, prefix: str, codes: str = "weight_packed") -> None:
        self._files, self._prefix, self._codes = files, prefix, f"{prefix}.{codes}"
        packed, scale = (stored(files, name, prefix) for name in (self._codes, f"{prefix}.weight_scale"))
        self.shape = (packed[0], 2 * packed[-1])
        if (
            len(packed) != 2
            or scale != (packed[0], self.shape[1] // GROUP)
            or files.tensors[f"{prefix}.weight_scale"].dtype.itemsize != 1
        ):
            raise mismatch(prefix, f"scales {scale} do not fit codes of 4-bit floats {self.shape}")

    def read(self, row: int | None) -> torch.Tensor:
        return self.coded(row).dequantized()

    def coded(self, row: int | None) -> QuantizedTensor:
        scale = self._files.read(f"{self._prefix}.weight_scale", row).view(torch.uint8)
        return QuantizedTensor("mxfp4", halves(self._files.read(self._codes, row)), scale, None)


def halves(raw: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] -> codes [..., 2n], the low half of each first."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def matrices(files: TensorFiles, config: dict[str, Any]) -> Matrices:
    """Raises ModelError for unsupported variants."""
    names = [n.removesuffix("_blocks") for n in files.tensors if n.endswith("_blocks")]
    found: dict[str, QuantizedWeight] = {n: Mxfp4Matrix(files, n) for n in names}
    return found, [f"{n}_{s}" for n in names for s in ("blocks", "scales")], "MXFP4"
