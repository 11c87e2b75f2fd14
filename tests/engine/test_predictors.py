"""Every predictor in a running engine: it fetches ahead, changes no logit, and costs a router call only if it asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from core.config import LoadSpec, Sampling, Settings
from core.engine import Engine
from core.policy.predict import Guess, Predictor, View
from core.registry import variants
from tests.equality.passes import plain_transformers, run

STEPS = 6


@pytest.fixture(scope="module")
def exact(model: Path) -> Iterator[Engine]:
    settings = Settings({"budget": "50%", "scope": "global"})
    engine = Engine.load(LoadSpec.checked(str(model), settings, dtype="float32", context=256))
    yield engine
    engine.unload()


@pytest.fixture(scope="module")
def wanted(model: Path) -> tuple[torch.Tensor, list[int]]:
    plain = plain_transformers(model, torch.float32)
    return run(plain, DynamicCache(config=plain.config), lambda step: None, STEPS)


@pytest.mark.parametrize("name", [v.name for v in variants("predictor")])
def test_no_predictor_changes_a_logit(exact: Engine, wanted: tuple[torch.Tensor, list[int]], name: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    probe = exact._probe
    exact.change({"predictor": "none"})
    exact.residency.take_counts()
    observe = exact._observe
    watched: list[int] = []

    def watch(layer: int, *rest: Any) -> None:
        watched.append(layer)
        observe(layer, *rest)

    monkeypatch.setattr(exact, "_observe", watch)
    monkeypatch.setattr(exact._step, "_probe", lambda at, of: asked.append(of) or probe(at, of))
    exact.change({"predictor": name})
    logits, tokens = run(exact.model, exact.fresh_cache(), lambda step: None, STEPS)
    exact.residency.check_integrity()
    assert (logits - wanted[0]).abs().max().item() == 0.0
    assert tokens == wanted[1]
    predictor = exact._step.predictor
    assert predictor is not None
    assert (exact.residency.take_counts().issued > 0) == predictor.looks
    assert bool(asked) == bool(watched) == predictor.asks


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", [v.name for v in variants("predictor") if v.name != "none"])
def test_every_predictor_fetches_in_either_scope(exact: Engine, name: str, scope: str) -> None:
    """Also one that names more experts than there are slots: the first of them displace what was not named."""
    exact.change({"predictor": name, "scope": scope, "budget": "50%"})
    exact.residency.take_counts()
    run(exact.model, exact.fresh_cache(), lambda step: None, STEPS)
    counts = exact.residency.take_counts()
    assert counts.issued > 0 and counts.used + counts.late > 0
    exact.residency.check_integrity()
    exact.change({"scope": "global"})


class Listener(Predictor):
    """Names nothing; keeps what it is told of the request."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int]] = []

    def predict(self, view: View) -> Sequence[Guess]:
        if view.layer == 0:
            self.heard.append((view.request, len(view.ids), view.experts))
        return ()


def test_every_prompt_begins_a_request(exact: Engine) -> None:
    exact.change({"predictor": "recent"})
    exact._step.predictor = listener = Listener()
    for _ in range(2):
        list(exact.generate("Why do caches work?", Sampling(max_new_tokens=3)))
    first, second = (sorted({request for request, _, _ in listener.heard}))
    assert second == first + 1
    prompts = [i for i, (_, tokens, _) in enumerate(listener.heard) if tokens > 1]
    assert [listener.heard[i][0] for i in prompts] == [first, second]
    assert {experts for _, _, experts in listener.heard} == {exact.shape.experts}
