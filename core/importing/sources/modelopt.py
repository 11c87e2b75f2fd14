"""NVIDIA's TensorRT Model Optimizer: 4-bit floats (NVFP4), 8-bit floats, 4-bit integers with AWQ's scales of inputs.

How a module is stored is recognised from its tensors, as settings name layers by patterns: `weight` with
`weight_scale`, `weight_scale_2` of NVFP4, and `pre_quant_scale`, by which the module's inputs are multiplied. Integers
are packed two outputs to a byte, the even one in the low half. Scales of activations and of the KV cache are not used.
"""

from typing import Any

import torch

from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, scaled, stored
from core.importing.sources.fp8 import FLOATS, Fp8Matrix
from core.importing.sources.integers import IntegerMatrix, Integers
from core.importing.sources.nvfp4 import Nvfp4Matrix
from core.memory.codec.coded import QuantizedTensor

PARTS = ("weight_scale", "weight_scale_2", "pre_quant_scale", "input_scale", "k_scale", "v_scale")


class PackedOutputs(IntegerMatrix):
    """`weight` uint8 [out / 2, in] of signed codes, `weight_scale [out, in / group]`."""

    symmetric = True

    def __init__(self, files: TensorFiles, prefix: str) -> None:
        self._files, self._prefix = files, prefix
        packed, scale = (stored(files, f"{prefix}.{part}", prefix) for part in ("weight", "weight_scale"))
        self.shape, self.scales = (2 * packed[0], packed[-1]), scale
        if len(packed) != 2 or len(scale) != 2 or scale[0] != self.shape[0] or self.shape[1] % scale[1]:
            raise mismatch(prefix, f"scales {scale} do not fit packed codes {packed}")

    def unpack(self) -> Integers:
        packed = self._files.read(f"{self._prefix}.weight")
        codes = torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1) ^ 8
        return Integers(4, codes, self._files.read(f"{self._prefix}.weight_scale").contiguous(), None, None)


class ScaledInputs(QuantizedWeight):
    """A weight whose inputs are multiplied by numbers of their own: no codes hold it."""

    def __init__(self, files: TensorFiles, name: str, inner: QuantizedWeight) -> None:
        self._files, self._name, self._inner = files, name, inner
        self.shape, self.bits, self.scales = inner.shape, inner.bits, inner.layout
        if torch.Size(stored(files, name, name)).numel() != self.shape[-1]:
            raise mismatch(name, f"it does not fit {self.shape[-1]} inputs")

    def read(self, row: int | None) -> torch.Tensor:
        return self._inner.read(row).float() * self._files.read(self._name).float().view(-1)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        return None


class BlockFp8(Fp8Matrix):
    """FP8 whose scales of blocks are stored as [out, 1, in, 1]."""

    def __init__(self, files: TensorFiles, name: str, scale: str, dtype: torch.dtype) -> None:
        grid = files.tensors[scale].shape
        flat = (grid[0], grid[2]) if len(grid) == 4 and grid[1::2] == (1, 1) else grid
        super().__init__(files, name, scale, None, dtype, flat)


def matrices(files: TensorFiles, config: dict[str, Any], dtype: torch.dtype) -> Matrices:
    """Raises ModelError for unsupported variants."""
    found: dict[str, QuantizedWeight] = {}
    for name, prefix, at in scaled(files):
        if at.dtype in FLOATS:
            found[name] = BlockFp8(files, name, f"{name}_scale", dtype)
        elif at.dtype == torch.uint8 and f"{name}_scale_2" in files.tensors:
            found[name] = Nvfp4Matrix(files, name, f"{name}_scale", f"{name}_scale_2", divides=False)
        elif at.dtype == torch.uint8:
            found[name] = PackedOutputs(files, prefix)
        else:
            raise mismatch(name, f"{str(at.dtype).removeprefix('torch.')} with a scale")
        if f"{prefix}.pre_quant_scale" in files.tensors:
            found[name] = ScaledInputs(files, f"{prefix}.pre_quant_scale", found[name])
    prefixes = {name.rpartition(".")[0] for name in found}
    taken = [f"{prefix}.{part}" for prefix in prefixes for part in PARTS]
    return found, taken, f"ModelOpt {str(config.get('quant_algo') or 'mixed')[:40]}"
