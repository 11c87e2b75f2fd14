"""How long the pieces are in which a prompt is read: as the budget pays for their workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.capacity import sizes
from core.capacity.plan import plan
from core.capacity.sizes import Sizes
from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("pieces"), max_position_embeddings=4096))


def planned(path: Path, budget: str, context: int = 4096) -> Sizes:
    return plan(LoadSpec.checked(str(path), Settings({"budget": budget}), context=context)).sizes


def test_small_experts_pay_for_short_pieces_alone(path: Path) -> None:
    assert planned(path, "100%").chunk == sizes.SHORT_CHUNK
    assert planned(path, "100%", 300).chunk == 300


def test_each_kind_of_budget_has_its_share(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = planned(path, "100%")
    monkeypatch.setattr(sizes, "WORTH_SHARED", 1e6)
    monkeypatch.setattr(sizes, "WORTH_BYTES", 0.0)
    long = planned(path, "100%")
    assert long.chunk == sizes.PREFILL_CHUNK and long.workspace > short.workspace
    assert planned(path, str(short.bytes(short.slots_all))) == short
    monkeypatch.setattr(sizes, "WORTH_SHARED", (long.workspace - short.workspace) / 2 / (short.slots_all * short.slot))
    assert planned(path, "100%").chunk == sizes.PREFILL_CHUNK // 2
    assert planned(path, "50%").chunk < sizes.PREFILL_CHUNK // 2


def test_measuring_keeps_to_short_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "WORTH_SHARED", 1e6)
    engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), context=2048))
    try:
        assert engine.sizes.chunk == 2048
        with engine.workbench("a test") as bench:
            assert bench.chunk == sizes.SHORT_CHUNK
    finally:
        engine.unload()
