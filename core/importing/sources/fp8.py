"""FP8: weights of 8-bit floats with one scale per block (`weight_scale_inv`, 128 x 128), row or tensor.

None of our formats holds such codes. They are dequantised as in transformers: float times scale in fp32, rounded to the
model's number type.
"""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, rows
from core.memory.codec.coded import QuantizedTensor, scales

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("_scale_inv", "_scale")  # suffixes of the weight's name


class Fp8Matrix(QuantizedWeight):
    """One FP8 weight, [out, in] or stacked [experts, out, in]."""

    bits = 8

    def __init__(
        self,
        files: TensorFiles,
        name: str,
        scale: str,
        block: tuple[int, int] | None,
        dtype: torch.dtype,
        grid: tuple[int, ...] | None = None,
    ) -> None:
        """`block`: rows and columns that share a scale, `grid`: the scales' shape, where it is not the stored one."""
        self._files, self._name, self._scale, self._dtype = files, name, scale, dtype
        self.shape = files.tensors[name].shape
        self._grid = _grid(grid or files.tensors[scale].shape, self.shape, name)
        self._blocks = [
            _block(whole, parts, given, name)
            for whole, parts, given in zip(self.shape[-2:], self._grid[-2:], block or (0, 0), strict=True)
        ]

    def read(self, row: int | None) -> torch.Tensor:
        """In the model's number type, as transformers loads it."""
        if row is not None and len(self.shape) == 2:
            return rows(self.read(None), row)
        weight = numbers(self._files.read(self._name, row))
        scale = scales(self._files.read(self._scale)).view(self._grid)
        if row is not None and len(scale) > 1:
            scale = scale[row : row + 1]
        for dim, block in zip((-2, -1), self._blocks, strict=True):
            scale = scale.repeat_interleave(block, dim) if scale.shape[dim] > 1 else scale
            scale = scale.narrow(dim, 0, min(scale.shape[dim], weight.shape[dim]))  # the last block may be partial
        return weight.mul_(scale).to(self._dtype)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        return None


def numbers(weight: torch.Tensor) -> torch.Tensor:
    """FP8 as fp32, by table lookup: torch converts them on a CPU one by one."""
    table = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float()
    return table.index_select(0, weight.view(torch.uint8).flatten().int()).view(weight.shape)


def _grid(scale: tuple[int, ...], shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The scale's shape, extended to as many dimensions as the weight."""
    count = torch.Size(scale).numel()
    if len(scale) == len(shape):
        return scale
    if count == 1:
        return (1,) * len(shape)
    if scale == shape[:1]:
        return (*scale, *(1,) * (len(shape) - 1))
    raise mismatch(name, f"scales {scale} do not fit a weight {shape}")


def _block(whole: int, parts: int, given: int, name: str) -> int:
    """How many rows or columns share a scale."""
    if given and -(-whole // given) == parts:
        return given
    if whole % parts:
        raise mismatch(name, f"{parts} scales do not fit {whole} rows or columns")
    return whole // parts


def pairs(files: TensorFiles) -> dict[str, str]:
    """Maps FP8 weights to the names of their scales. Raises ModelError when one is missing."""
    found: dict[str, str] = {}
    for name, at in files.tensors.items():
        if at.dtype in FLOATS:
            scale = next((f"{name}{s}" for s in SCALES if f"{name}{s}" in files.tensors), None)
            if scale is None:
                raise ModelError(
                    f"The FP8 weight {name!r} has no scale. The checkpoint is incomplete: download it again."
                )
            found[name] = scale
    return found


def matrices(files: TensorFiles, config: dict[str, Any], dtype: torch.dtype) -> Matrices:
    """Raises ModelError for unsupported variants."""
    given = config.get("weight_block_size")
    block = (int(given[0]), int(given[1])) if given else None
    of = pairs(files)
    found: dict[str, QuantizedWeight] = {n: Fp8Matrix(files, n, s, block, dtype) for n, s in of.items()}
    label = f"FP8, blocks of {block[0]} x {block[1]}" if block else "FP8, one scale a tensor"
    return found, list(of.values()), label
