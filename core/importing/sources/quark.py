"""AMD Quark: MXFP4 as `weight` uint8 [out, in / 2] with exponents `weight_scale` [out, in / 32], and 8-bit floats with
a `weight_scale` a tensor or row. Scales of activations and of the KV cache are not used."""

from typing import Any

import torch

from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import Matrices, QuantizedWeight, mismatch, scaled
from core.importing.sources.fp8 import FLOATS, Fp8Matrix
from core.importing.sources.mxfp4 import PackedMxfp4Matrix

PARTS = ("weight_scale", "weight_zero_point", "input_scale", "output_scale", "k_scale", "v_scale")


def matrices(files: TensorFiles, config: dict[str, Any], dtype: torch.dtype) -> Matrices:
    """Raises ModelError for unsupported variants."""
    found: dict[str, QuantizedWeight] = {}
    kinds: dict[str, None] = {}
    for name, prefix, at in scaled(files):
        if at.dtype in FLOATS:
            kinds["FP8"], found[name] = None, Fp8Matrix(files, name, f"{name}_scale", None, dtype)
        elif at.dtype == torch.uint8 and files.tensors[f"{name}_scale"].dtype in (torch.uint8, torch.float8_e8m0fnu):
            kinds["MXFP4"], found[name] = None, PackedMxfp4Matrix(files, prefix, "weight")
        else:
            raise mismatch(name, f"Quark's {str(at.dtype).removeprefix('torch.')}; MXFP4 and FP8 are read")
    taken = [f"{name.rpartition('.')[0]}.{part}" for name in found for part in PARTS]
    return found, taken, f"Quark {' and '.join(sorted(kinds))}"
