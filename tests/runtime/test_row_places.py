"""Clamped gates of any width: a row gets the bits that it has in transformers' one tensor of all rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.runtime.row_places import Places, depends_on_position, gated
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.architectures.trial import known, random_model, run, save, transformers_own
from tests.selection import layered


def clamped(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=7.0)) * up


def own_rows(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return gate.abs() * up


def test_a_gate_without_exponentials_needs_no_places() -> None:
    assert not depends_on_position(own_rows, 2 * 40, torch.float32)


@pytest.mark.parametrize("width", [8, 32, 40, 48, 56, 96])
@pytest.mark.parametrize("total", [1, 3, 4, 7, 130, 700])
def test_rows_are_computed_in_their_places(width: int, total: int) -> None:
    y = torch.randn(total, 2 * width, generator=torch.Generator().manual_seed(total)) * 3
    whole = clamped(y)
    for start in {0, 1, total // 2, total - 1} & set(range(total)):
        for end in {start + 1, (start + total + 1) // 2, total} - {start}:
            assert torch.equal(gated(clamped, y[start:end], Places(range(start, end), total)), whole[start:end])
    if total < 10:
        for at in ([total - 1], [0], list(range(total))[::-2]):
            assert torch.equal(gated(clamped, y[at], Places(at, total)), whole[at])


@pytest.mark.parametrize(
    ("model_type", "width"),
    layered(
        [("gpt_oss", 32), ("gpt_oss", 40), ("gpt_oss", 48), ("gpt_oss", 56), ("hy_v4", 48)],
        quick=lambda case: case == ("gpt_oss", 40),
    ),
)
def test_any_expert_width_is_exact(model_type: str, width: int, tmp_path: Path) -> None:
    if not known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    field = "intermediate_size" if model_type == "gpt_oss" else "moe_intermediate_size"
    path = save(random_model(model_type, **{field: width}), tmp_path)
    plain = transformers_own(path, torch.float32)
    want = run(plain, DynamicCache(config=plain.config), 8)
    engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype="float32"))
    try:
        assert (run(engine.model, engine.fresh_cache(), 8) - want).abs().max().item() == 0.0
    finally:
        engine.unload()
