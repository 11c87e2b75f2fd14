"""Which launcher is taken, and what is said and done where the driver fails: experts are computed without kernels."""

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core.hf import fused_rotary, quantized_linear
from core.memory.codec import PartSpec, kernels, make_codec
from core.memory.codec.base import Base
from core.memory.codec.kernels.build import Binary, Kinds
from core.memory.codec.kernels.driver import DriverLauncher
from core.memory.codec.kernels.products import ByTriton, SlotKernels
from core.memory.cuda_driver import CudaDriver, DriverError
from core.runtime.expert_math import ExpertMath
from core.runtime.product_trials import choose_products
from tests import kernel_cases as cases
from tests.fake_driver import IMAGE, MEMORY, FakeDriver
from tests.logged import Logged

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(kernels, "why_not", lambda device: "")
    monkeypatch.setattr(kernels, "lacking", lambda: "a C compiler")
    kernels.say_unavailable.cache_clear()


def launcher(fake: FakeDriver) -> DriverLauncher:
    def build(kernel: Any, constants: Mapping[str, Any], kinds: Kinds, capability: int) -> Binary:
        return fake.known(Binary(kernel.__name__, b"", "Q" * count(kinds), 0, 32, 0), [8] * count(kinds))

    return DriverLauncher(fake.driver(), 0, 89, lambda index: 0, build)


def count(kinds: Kinds) -> int:
    return sum(len(kind) if isinstance(kind[0], tuple) else 1 for kind in kinds if kind)


FAULTS = [
    (FakeDriver(faults={"cuModuleLoadData": MEMORY}), "CUDA error: out of memory (cuModuleLoadData: 2)"),
    (FakeDriver(faults={"cuModuleLoadData": IMAGE}), "device kernel image is invalid (cuModuleLoadData: 200)"),
    (FakeDriver(faults={"cuLaunchKernel": MEMORY}), "CUDA error: out of memory (cuLaunchKernel: 2)"),
    (FakeDriver(lacks={"cuModuleGetFunction"}), "NVIDIA's driver has no cuModuleGetFunction"),
]


@pytest.mark.parametrize(("fake", "said"), FAULTS)
def test_experts_are_computed_without_kernels_that_fail(fake: FakeDriver, said: str, caplog: Logged) -> None:
    parts = {"gate_up_proj": torch.randn(64, 32), "down_proj": torch.randn(32, 32)}
    codec = cases.codec_of("int4-g32", parts, torch.float32, CPU, False)
    module = SimpleNamespace(has_gate=True, has_bias=False, _apply_gate=cases.gate)
    slots, math = cases.copies_of(codec, parts, 2), ExpertMath(module, codec, SlotKernels(codec, launcher(fake)))
    assert math.grouped is not None
    with caplog.at_level(logging.WARNING, "moestro.kernels"):
        choose_products([math], lambda layer: slots, torch.float32)
    assert math.grouped is None
    assert said in caplog.text and "Triton does not find a C compiler here" in caplog.text
    x = torch.randn(1, 32)
    assert torch.equal(math.token.multiply(slots, x), ExpertMath(module, codec).token.multiply(slots, x))


@pytest.mark.parametrize(("fake", "said"), FAULTS[:1])
def test_dense_layers_are_computed_without_kernels_that_fail(
    fake: FakeDriver, said: str, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    specs = {quantized_linear.WEIGHT: PartSpec((32, 64), torch.float32)}
    codec = make_codec("int8", specs=specs, dtype=torch.float32, device=CPU)
    layer = quantized_linear.QuantizedLinear(nn.Linear(64, 32, bias=False), codec)
    assert isinstance(codec, Base)
    monkeypatch.setattr(quantized_linear, "make_kernels", lambda codec: SlotKernels(codec, launcher(fake)))
    with caplog.at_level(logging.WARNING, "moestro.kernels"):
        assert quantized_linear._kernels(codec, layer._raw) is None
    assert said in caplog.text


def test_a_wrong_result_is_found(caplog: Logged) -> None:
    """Launches that reach a driver and compute nothing."""
    parts = {"gate_up_proj": torch.randn(64, 32), "down_proj": torch.randn(32, 32)}
    codec = cases.codec_of("checkpoint", parts, torch.float32, CPU, False)
    module = SimpleNamespace(has_gate=True, has_bias=False, _apply_gate=cases.gate)
    slots, fake = cases.copies_of(codec, parts, 2), FakeDriver()
    math = ExpertMath(module, codec, SlotKernels(codec, launcher(fake)))
    with caplog.at_level(logging.WARNING, "moestro.kernels"):
        choose_products([math], lambda layer: slots, torch.float32)
    assert math.grouped is None and fake.launches and "off in a trial" in caplog.text


def test_triton_launches_only_where_the_driver_does_not(monkeypatch: pytest.MonkeyPatch, caplog: Logged) -> None:
    codec = cases.codec_of("int4-g32", {"down_proj": torch.randn(8, 64)}, torch.float32, CPU, False)
    ours = launcher(FakeDriver())
    monkeypatch.setattr(kernels, "driver_launcher", lambda device: ours)
    assert cases.kernels_of(codec)._launcher is ByTriton  # interpreted, on a CPU
    monkeypatch.setattr(codec, "device", CUDA)
    assert cases.kernels_of(codec)._launcher is ours and kernels.notice(CUDA) == ""
    assert kernels.launched_by(CUDA) == "the CUDA driver"

    def refuse(device: torch.device | None = None) -> CudaDriver:
        raise DriverError("NVIDIA's driver cannot be opened (not found)")

    monkeypatch.setattr(kernels, "driver_launcher", refuse)
    monkeypatch.setattr(kernels, "lacking", lambda: "")
    assert cases.kernels_of(codec)._launcher is ByTriton and kernels.notice(CUDA) == ""
    assert "cannot be opened" in kernels.launched_by(CUDA)
    monkeypatch.setattr(kernels, "lacking", lambda: "a C compiler")
    with caplog.at_level(logging.WARNING, "moestro.kernels"):
        assert kernels.make_kernels(codec) is None
    assert "the CUDA driver cannot start them (NVIDIA's driver cannot be opened (not found))" in caplog.text
    assert "one at a time" in kernels.notice(CUDA) and "cannot be opened (not found)" in kernels.notice(CUDA)


def test_the_kernel_of_rotary_embeddings_is_launched_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    launches: list[tuple[Any, ...]] = []

    def ours(kernel: Any, constants: Mapping[str, Any]) -> Any:
        assert kernel is rotate and constants == {"COUPLES": 4} | fused_rotary.OPTIONS
        return {(3, 1): lambda *given: launches.append(given)}

    from core.hf.rotary_kernel import rotate

    monkeypatch.setattr(kernels, "driver_launcher", lambda device: ours)
    fused_rotary._starter.cache_clear()
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    fused_rotary.launch((3, 1), (on_gpu, 5), {"COUPLES": 4})
    fused_rotary._starter.cache_clear()
    assert launches == [(on_gpu, 5)]
