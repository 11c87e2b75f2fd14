"""NVFP4: 4-bit float codes (E2M1), two per byte with the even input in the low half, a scale of e4m3 per 16 inputs and
one of fp32 for the whole matrix.

weight = code * (scale * factor) in fp32. modelopt stores the factor, compressed-tensors what scales are divided by: its
reciprocal, rounded to fp32, is the factor, as in the kernels that multiply such matrices. Where the divisor is no power
of two, a weight may be off by a last digit or two of fp32 from what compressed-tensors' own division gives.
"""

import torch

from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import QuantizedWeight, mismatch, rows, stored
from core.importing.sources.mxfp4 import halves
from core.memory.codec.coded import QuantizedTensor

GROUP = 16


class Nvfp4Matrix(QuantizedWeight):
    """One weight [out, in], or stacked experts [experts, out, in], by the names of its three tensors."""

    def __init__(self, files: TensorFiles, codes: str, scale: str, factor: str, *, divides: bool) -> None:
        """`divides`: scales are divided by the factor."""
        self._files, self._names, self._divides = files, (codes, scale, factor), divides
        packed, scales, factors = (stored(files, name, codes) for name in self._names)
        self.shape = (*packed[:-1], 2 * packed[-1])
        types = [files.tensors[name].dtype for name in self._names]
        many = len(packed) == 3 and factors[:1] == packed[:1]
        if (
            types != [torch.uint8, torch.float8_e4m3fn, torch.float32]
            or not 2 <= len(packed) <= 3
            or self.shape[-1] % GROUP
            or scales != (*packed[:-1], self.shape[-1] // GROUP)
            or torch.Size(factors).numel() != (packed[0] if many else 1)
        ):
            raise mismatch(codes, f"scales {scales} and {factors} do not fit codes of 4-bit floats {self.shape}")
        self._many = many

    def read(self, row: int | None) -> torch.Tensor:
        return self.coded(row).dequantized()

    def coded(self, row: int | None) -> QuantizedTensor:
        codes, scale = (self._files.read(name, row) for name in self._names[:2])
        factor = self._files.read(self._names[2]).flatten()
        if self._divides:
            factor = factor.reciprocal()
        if self._many:
            factor = rows(factor, row).view(-1, 1, 1)
        each = factor.expand(*codes.shape[:-1], 1).contiguous()
        return QuantizedTensor("nvfp4", halves(codes), scale, None, each)
