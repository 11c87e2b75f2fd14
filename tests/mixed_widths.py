"""A tiny checkpoint of compressed-tensors whose experts' widths differ by layer and by matrix."""

from pathlib import Path
from typing import Any

import torch

from tests.quantized import fp8, write
from tests.quantized_layouts import nvfp4_by_compressed_tensors, packed_by_compressed_tensors

WIDTHS = {
    r"layers\.0.*experts.*down": packed_by_compressed_tensors(8, -1, True),
    r"layers\.[03].*experts.*down|layers\.0.*experts": packed_by_compressed_tensors(4, 32, True),
    r"layers\.2.*experts": fp8(None, "weight_scale"),
    r"experts": nvfp4_by_compressed_tensors,
}
GROUPS = ("int", 8, -1), ("int", 4, 32), ("float", 8, -1), ("float", 4, 16)  # type, bits, group
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        str(at): {"weights": {"type": kind, "num_bits": bits, "group_size": group}}
        for at, (kind, bits, group) in enumerate(GROUPS)
    },
}
FORMATS = ("int4-g32-sym/int8", "nvfp4", "checkpoint", "nvfp4/int4-g32-sym")  # that hold it


def make_widths(folder: Path, **sizes: Any) -> Path:
    """The checkpoint, of four layers, without a tokenizer."""
    return write("qwen3_moe", folder, WIDTHS, CONFIG, dtype=torch.bfloat16, **{"num_hidden_layers": 4, **sizes}).path
