"""Experts in blocks: the bits of whole ones, whatever is resident."""

from collections.abc import Iterator

import pytest
import torch

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import ARCHITECTURES
from tests.equality.conftest import Reference
from tests.equality.passes import PROMPT, STEPS, run
from tests.selection import layered

CASES: list[dict[str, object]] = [
    {"split": "uniform", "split.uniform.theta": 0.5, "budget": "50%"},
    {"split": "uniform", "split.uniform.theta": 0.5, "budget": "50%", "predictor": "gate", "eviction": "lcp"},
    {"split": "uniform", "split.uniform.theta": 0.0, "budget": "50%", "predictor": "gate"},
    {"split": "uniform", "split.uniform.theta": 1.0, "budget": "50%", "scope": "global", "predictor": "all_next"},
    {"split": "uniform", "split.uniform.theta": 0.5, "budget": "50%", "eviction": "none", "buffer": 4},
]
ALL = {"budget": "all", "split": "uniform"}
WHOLE: list[dict[str, object]] = [
    {"split": "whole", "budget": "all"},
    {"split": "whole", "budget": "50%", "scope": "global", "predictor": "all_next"},
    {"split": "whole", "budget": "50%", "predictor": "gate", "eviction": "lcp"},
]


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[Engine]:
    spec = LoadSpec.checked(str(reference.path), Settings({"budget": "all"}), dtype="float32", blocks=2)
    engine = Engine.load(spec)
    yield engine
    engine.unload()


@pytest.mark.parametrize(
    "reference", layered(list(ARCHITECTURES), quick=lambda arch: arch == "qwen3_moe"), indirect=["reference"]
)
def test_logits_are_those_of_whole_experts(engine: Engine, reference: Reference) -> None:
    for case in (ALL, *CASES, *WHOLE):
        engine.change({**Settings(), **case})
        logits, _ = run(engine.model, engine.fresh_cache(), lambda step: None)
        engine.expert_cache.check_integrity()
        assert torch.equal(logits, reference.logits), case
    assert engine.manifest()["exact"] is True


@pytest.mark.parametrize("reference", ["qwen3_moe"], indirect=True)
def test_what_is_turned_between_two_tokens_changes_no_bit(engine: Engine, reference: Reference) -> None:
    engine.change({**Settings(), **ALL})
    whole, _ = run(engine.model, engine.fresh_cache(), lambda step: None)

    def turn(step: int) -> None:
        engine.change({**Settings(), **CASES[step % len(CASES)]})
        engine._controller.apply(engine.parts)
        engine.expert_cache.check_integrity()

    logits, _ = run(engine.model, engine.fresh_cache(), turn)
    assert logits.shape[0] == len(PROMPT) + STEPS and torch.equal(logits, whole)
