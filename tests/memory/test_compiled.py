"""Kernels compiled for GPUs without having one: rotary embeddings, attention, and experts as Triton's own JIT has them.
Their results: test_interpreted.py."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.hf import fused_rotary
from core.hf.attention_launch import AttentionKernels, Shape
from core.hf.rotary_form import Form
from core.memory.codec import FORMATS
from core.memory.codec.kernels.build import POINTERS, Kinds, binary_of, compiled, kinds_of
from core.memory.codec.kernels.check import Compiler
from core.memory.codec.kernels.products import LANES, SlotKernels
from tests import kernel_cases as cases
from tests.hf.rotary_cases import DTYPES, FUNCTIONS
from tests.selection import layered

CAPABILITIES = (80, 89, 90)


@pytest.fixture(autouse=True)
def _a_gpu_to_compile_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's JIT asks its driver which GPU there is, and nothing more, unless it launches."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
    )
    monkeypatch.setattr(type(driver), "active", property(lambda self: gpu))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build(form: Form, dtype: torch.dtype, table: torch.dtype, capability: int) -> Any:
    """The kernel, compiled for heads of 128 numbers, as the CUDA driver launches it where Triton has no compiler."""
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
def test_it_compiles_without_contracting_products(capability: int, file: str) -> None:
    """A sum contracted with a product would be rounded once, where torch rounds twice. Numbers of 16 bits are rounded
    to the nearest."""
    function = FUNCTIONS[file]
    for dtype in DTYPES:
        table = torch.float32 if function.single else dtype
        made = build(function.form(64 if function.passes_on else 128, dtype), dtype, table, capability)
        text = made.asm["ptx"]
        assert len(made.asm["cubin"]) > 0
        assert not contracted(text), dtype
        assert bool(re.search(r"(cvt|mul|add|fma)\.rn\.b?f16", text)) == (dtype != torch.float32), dtype
        assert not re.search(r"\.rz\.b?f16", text), dtype


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
def test_they_fit_into_the_shared_memory_of_a_program(capability: int, name: str, dtype: torch.dtype) -> None:
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


CAPABILITY = 80


class BothWays:
    """A launcher that compiles what it is to launch, here and by the JIT: `same` says of each kernel whether the code
    is equal."""

    def __init__(self) -> None:
        self.same: list[tuple[str, bool]] = []

    def __call__(self, kernel: Any, constants: Mapping[str, Any]) -> Any:
        def launch(programs: tuple[int, ...], *arguments: Any) -> None:
            ours = compiled(kernel, constants, kinds_of(arguments), CAPABILITY)
            theirs = kernel.warmup(*arguments, grid=programs, **constants)
            self.same.append((kernel.__name__, ours.asm["cubin"] == theirs.asm["cubin"]))

        class Starter:
            def __getitem__(self, programs: tuple[int, ...]) -> Any:
                return lambda *arguments: launch(programs, *arguments)

        return Starter()


@pytest.mark.long(0.1)
@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_jit_s(name: str) -> None:
    """Of arguments that are multiples of 16, and of some that are not: odd strides, and tensors that begin anywhere.

    mxfp4 has every kernel but that of plain weights; how arguments are told is one function for all.
    """
    for transposed in (False, True)[: 1 + FORMATS[name].is_plain]:
        launcher, inputs = BothWays(), cases.odd_inputs(name, long=False)
        experts = cases.matrices(2, 5, inputs, transposed, bias=True)
        codec = cases.codec_of(name, experts[0], torch.bfloat16, torch.device("cpu"), transposed)
        kernels, slots = SlotKernels(codec, launcher), [slot.raw for slot in cases.slots_of(codec, experts)]
        states = torch.zeros(3 * inputs + 1, dtype=torch.bfloat16)
        for x in (states[: 2 * inputs].view(2, inputs), states[1 : inputs + 1].view(1, inputs)):
            kernels.multiply("down_proj", slots, x)
        table, ids = (torch.zeros(LANES, dtype=torch.int64) for _ in range(2))
        kernels.multiply_by_ids("down_proj", table, ids[1:], states[:inputs].view(1, inputs))
        if name in cases.CODED:
            list(kernels.dequantized("down_proj", slots))
        assert len(launcher.same) == 3 + (name in cases.CODED)
        assert all(same for _, same in launcher.same), launcher.same
