"""The kernels of a decoded token's attention, compiled for GPUs without having one. Their results: test_interpreted.py,
tests/gpu/test_kernels.py."""

from pathlib import Path

import pytest
import torch

from core.hf.attention_launch import AttentionKernels, Shape
from core.memory.codec.kernels.check import Compiler

META = torch.device("meta")
SHAPES = {  # heads, heads of keys and values, width, width of values
    "grouped": (32, 4, 128, 128),
    "narrow": (64, 8, 64, 64),
    "latent": (128, 128, 192, 128),
    "each its own": (16, 16, 128, 128),
}
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # bytes a program can have


@pytest.mark.long(0.1)  # test_interpreted.py runs them, test_kernels.py and test_gpu_code.py compile others
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_fit_into_the_shared_memory_of_a_program(
    capability: int, name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heads, shared, width, values = SHAPES[name]
    compiler = Compiler(capability)
    kernels = AttentionKernels(Shape(heads, shared, width, values, dtype, width**-0.5), compiler)
    q = torch.empty(1, heads, 1, width, dtype=dtype, device=META)
    k, v = (torch.empty(1, shared, 256, of, dtype=dtype, device=META) for of in (width, values))
    for last in (None, torch.empty(1, dtype=torch.int64, device=META)):
        kernels(q, k, v, last)
    assert len(compiler.made) == 4 and all(len(made.asm["cubin"]) for made in compiler.made)
    assert max(made.metadata.shared for made in compiler.made) <= SHARED[capability]
    assert not any(".local" in made.asm["ptx"] for made in compiler.made), "registers that did not suffice"
