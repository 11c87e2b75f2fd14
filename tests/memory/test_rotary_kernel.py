"""The kernel of rotary embeddings, compiled for GPUs without having one. Its results: test_interpreted.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from core.hf import fused_rotary
from core.hf.rotary_form import Form
from tests.hf.rotary_cases import DTYPES, FUNCTIONS
from tests.selection import layered

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
CAPABILITIES = (80, 89, 90)


def build(form: Form, dtype: torch.dtype, table: torch.dtype, capability: int) -> Any:
    """The kernel, compiled for heads of 128 numbers."""
    triton = pytest.importorskip("triton", reason="the package triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from core.hf.rotary_kernel import rotate

    constants = fused_rotary.chosen(form, 128, 128)
    of = {"q": dtype, "k": dtype, "q_out": dtype, "k_out": dtype, "cos": table, "sin": table}
    names = rotate.arg_names
    signature = {
        name: "constexpr" if name in constants else POINTERS[of[name]] if name in of else "i32" for name in names
    }
    source = ASTSource(rotate, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=fused_rotary.OPTIONS)


def contracted(text: str) -> list[str]:
    """Instructions that multiply and add at once. Those by which GPUs without others multiply numbers of bfloat16 or
    add them have a constant in the other's place: -0, 1 or -1."""
    constants = set(re.findall(r"mov\.b16\s+(%\w+), (?:0x8000|0x3F80|0xBF80);", text))
    return [line for line in text.splitlines() if "fma" in line and not constants & set(re.findall(r"%\w+", line))]


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
        compiled = build(function.form(64 if function.passes_on else 128, dtype), dtype, table, capability)
        text = compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 0
        assert not contracted(text), dtype
        assert bool(re.search(r"(cvt|mul|add|fma)\.rn\.b?f16", text)) == (dtype != torch.float32), dtype
        assert not re.search(r"\.rz\.b?f16", text), dtype
