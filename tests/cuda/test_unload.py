"""Unloading gives back every byte, whoever still has a part of the engine; another model then fits in its place."""

from pathlib import Path

import pytest

from core.engine import Engine, wiring
from core.errors import BudgetError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.cuda.conftest import CONTEXT
from tests.fake_cuda import FakeCuda
from tests.fake_cuda.memory import MIB
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer


def loaded(path: Path, **settings: object) -> Engine:
    engine = Engine.load(LoadSpec.checked(str(path), Settings(settings), device="cuda", context=CONTEXT))
    list(engine.generate("hello there", Sampling(max_new_tokens=8), reuse=True))
    return engine


@pytest.mark.parametrize("predictor", layered(["none", "gate", "all_next"], quick=lambda name: name == "gate"))
def test_nothing_is_left_while_the_engine_is_still_referenced(fake_cuda: FakeCuda, model: Path, predictor: str) -> None:
    fake_cuda.tensors.product_bytes = 8 * MIB
    engine = loaded(model, budget="45%", predictor=predictor)
    held = engine.model, engine.expert_cache, engine.wiring, engine.fresh_cache()
    engine.unload()
    assert (fake_cuda.memory.allocated, fake_cuda.memory.reserved) == (0, 0)
    assert fake_cuda.pinned.used == 0
    assert held


@pytest.mark.long(0.1)
def test_a_model_is_loaded_in_the_place_of_another(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    """Each takes four fifths of the device."""
    path = save_tokenizer(
        make_checkpoint("qwen3_moe", tmp_path, num_experts=16, hidden_size=256, moe_intermediate_size=512)
    )
    first = loaded(path, budget="all")
    taken = first.memory().used
    fake_cuda.memory.total = taken + taken // 4
    with pytest.raises(BudgetError):
        loaded(path, budget="all")
    first.unload()
    second = loaded(path, budget="all")
    second.unload()
    assert fake_cuda.memory.reserved == 0
    assert taken > 64 * MIB


@pytest.mark.parametrize("part", ["begin", "with_measured_workspace"])
def test_a_load_that_fails_leaves_nothing(
    fake_cuda: FakeCuda, model: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fails(*_: object) -> None:
        raise BudgetError("not today")

    monkeypatch.setattr(wiring, part, fails)
    with pytest.raises(BudgetError, match="not today") as raised:
        loaded(model, budget="45%")
    assert (fake_cuda.memory.reserved, fake_cuda.pinned.used) == (0, 0)
    assert raised.value.__traceback__ is not None  # it is still there, and with it the frames


@pytest.mark.long(0.1)
def test_what_one_step_of_unloading_raises_stops_no_other(
    fake_cuda: FakeCuda, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(model, budget="45%")

    def broken() -> None:
        raise ValueError("it cannot be stopped")

    close = engine.predictor_host.close
    monkeypatch.setattr(engine.predictor_host, "close", broken)
    with pytest.raises(ValueError, match="cannot be stopped"):
        engine.unload()
    assert fake_cuda.memory.reserved == 0 and not engine.busy
    close()
