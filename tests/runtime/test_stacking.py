"""Experts are computed together only where that gives the same bits, and never where it cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.memory.arena import Arena, Slot
from core.memory.codec import Codec, PartSpec, make_codec
from core.runtime.expert_math import ExpertMath
from core.runtime.product_trials import worth_stacking

CPU = torch.device("cpu")
HIDDEN, INNER = 64, 32


def gate(y: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


def build(
    dtype: torch.dtype, transposed: bool, format: str = "checkpoint", bias: bool = False
) -> tuple[ExpertMath, list[Slot]]:
    up, down = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    shapes = {"gate_up_proj": up[::-1] if transposed else up, "down_proj": down[::-1] if transposed else down}
    specs = {name: PartSpec(shape, dtype) for name, shape in shapes.items()}
    codec: Codec = make_codec(format, specs=specs, dtype=dtype, device=CPU, is_transposed=transposed)
    arena, slots = Arena(codec, CPU), []
    for seed in range(4):
        random = torch.Generator().manual_seed(seed)
        slot = arena.allocate()
        codec.place(codec.encode({n: torch.randn(s, generator=random) * 0.1 for n, s in shapes.items()}), slot.raw)
        slots.append(slot)
    module = SimpleNamespace(has_gate=True, has_bias=bias, has_post_expert_norm=False, _apply_gate=gate)
    return ExpertMath(module, codec), slots


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_is_one_by_one(dtype: torch.dtype, transposed: bool) -> None:
    math, slots = build(dtype, transposed)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    each, together = math.one_by_one(slots, x), math.stacked(slots, x)
    assert each.shape == together.shape == (4, HIDDEN)
    assert (each - together).abs().max() <= 1e-2 * each.abs().max()


def test_it_must_be_quicker_and_equal_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    math, slots = build(torch.float32, False)
    monkeypatch.setattr(math, "stacked", math.one_by_one)
    monkeypatch.setattr("core.runtime.product_trials.WORTH_IT", 0.0)
    assert not worth_stacking(math, slots, HIDDEN, torch.float32)  # equal, but no quicker
    monkeypatch.setattr("core.runtime.product_trials.WORTH_IT", float("inf"))
    assert worth_stacking(math, slots, HIDDEN, torch.float32)  # equal, and counted as quicker
    monkeypatch.setattr(math, "stacked", lambda s, x: math.one_by_one(s, x) * (1 + 1e-6))
    assert not worth_stacking(math, slots, HIDDEN, torch.float32)  # quicker, but not equal


@pytest.mark.parametrize("wrong", [{"format": "int8"}, {"bias": True}])
def test_rounded_weights_and_biases_are_never_stacked(wrong: dict[str, object]) -> None:
    math, slots = build(torch.float32, False, **wrong)  # type: ignore[arg-type]
    assert not worth_stacking(math, slots, HIDDEN, torch.float32)
