"""Matrices and rows that products are tried with. Imported on machines that have no more than the engine and pytest."""

import functools

import torch

from core.memory.codec import FORMATS, Numbers, PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.matrix import Matrix, matrix
from core.runtime.program.gate import Gate
from tests.kernel_cases import CODED

PLAIN = ("bfloat16", "float16", "float32")
GROUPS = {"int8": 32} | {n: f.grain for n, f in FORMATS.items() if f.grain > 64}  # of inputs, where not 64
GATES = {
    "silu": Gate(1),
    "gelu": Gate(1, "gelu_tanh"),
    "oss": Gate(1, interleaved=True, slope=1.702, limit=7.0, shift=1.0),
}


@functools.cache
def case(format: str, outputs: int, inputs: int, count: int = 1) -> tuple[Matrix, torch.Tensor, torch.Tensor]:
    """A matrix in several slots (uint8 [slots, bytes]), and its numbers in the first [out, in]."""
    if format == "float32":
        dtype, format = torch.float32, "checkpoint"
    else:
        dtype = torch.float16 if format == "float16" else torch.bfloat16
    stored = Numbers(dtype, torch.float16, torch.bfloat16)
    codec = make_codec(
        format, specs={"w": PartSpec((outputs, inputs), dtype)}, dtype=dtype, device=torch.device("cpu"), stored=stored
    )
    assert isinstance(codec, Base)
    random = torch.Generator().manual_seed(outputs * inputs)
    slots = torch.empty(count, -(-codec.slot_bytes // 64) * 64, dtype=torch.uint8)
    for slot in slots:
        codec.place(codec.encode({"w": torch.randn(outputs, inputs, generator=random).to(dtype)}), slot)
    return matrix(codec, "w"), slots, codec.dequantize(codec.views(slots[0]), "w")


def rows(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of x, some numbers of which are much larger than others."""
    random = torch.Generator().manual_seed(seed + inputs)
    x = torch.randn(count, inputs, generator=random)
    return (x * (1 + 30 * (torch.rand(x.shape, generator=random) < 0.01))).to(dtype)


def inputs_of(format: str, blocks: int) -> int:
    return blocks * (GROUPS.get(format, 64) if format in CODED else 8)
