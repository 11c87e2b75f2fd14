"""Kernels launched through the driver have the machine code that Triton's own JIT makes for the same arguments."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.memory.codec import FORMATS
from core.memory.codec.kernels.build import compiled, kinds_of
from core.memory.codec.kernels.products import LANES, SlotKernels
from tests import kernel_cases as cases

CAPABILITY = 80


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
