"""The kernel of rotary embeddings, compiled for GPUs without having one. Its results: test_interpreted.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from core.hf import fused_rotary
from core.hf.rotary_form import Form
from core.memory.codec.kernels.build import POINTERS, Kinds, binary_of, compiled
from tests.hf.rotary_cases import DTYPES, FUNCTIONS
from tests.selection import layered

CAPABILITIES = (80, 89, 90)


def build(form: Form, dtype: torch.dtype, table: torch.dtype, capability: int) -> Any:
    """The kernel, compiled for heads of 128 numbers, as the CUDA driver launches it where Triton has no compiler."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from core.hf.rotary_kernel import rotate

    constants = fused_rotary.chosen(form, 128, 128) | fused_rotary.OPTIONS
    of = {"q": dtype, "k": dtype, "q_out": dtype, "k_out": dtype, "cos": table, "sin": table}
    free = [name for name in rotate.arg_names if name not in constants]
    kinds: Kinds = tuple((POINTERS[of[name]], True) if name in of else ("i32", False) for name in free)
    made = compiled(rotate, constants, kinds, capability)
    binary = binary_of(made, kinds)
    assert binary.parameters == "".join("Q" if name in of else "i" for name in free) and binary.threads == 32
    return made


def contracted(text: str) -> list[str]:
    """Instructions that multiply and add at once. Those by which GPUs without others multiply numbers of bfloat16 or
    add them have a constant in the other's place: -0, 1 or -1."""
    constants = set(re.findall(r"mov\.b16\s+(%\w+), (?:0x8000|0x3F80|0xBF80);", text))
    return [line for line in text.splitlines() if "fma" in line and not constants & set(re.findall(r"%\w+", line))]


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    ("capability", "file"),
    layered(
        [(capability, file) for capability in CAPABILITIES for file in FUNCTIONS],
        quick=lambda case: case in [(90, "qwen3_moe"), (80, "ernie4_5_moe")],
    ),
)
def test_it_compiles_without_contracting_products(
    capability: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum contracted with a product would be rounded once, where torch rounds twice. Numbers of 16 bits are rounded
    to the nearest."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = FUNCTIONS[file]
    for dtype in DTYPES:
        table = torch.float32 if function.single else dtype
        made = build(function.form(64 if function.passes_on else 128, dtype), dtype, table, capability)
        text = made.asm["ptx"]
        assert len(made.asm["cubin"]) > 0
        assert not contracted(text), dtype
        assert bool(re.search(r"(cvt|mul|add|fma)\.rn\.b?f16", text)) == (dtype != torch.float32), dtype
        assert not re.search(r"\.rz\.b?f16", text), dtype
