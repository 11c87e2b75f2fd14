"""Answers and measuring run passes of their own over one model and one cache; neither shows in the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.runtime.expert_rows import PromptRows, TokenRows
from core.runtime.pipeline import StepDispatch
from core.runtime.routed import Routed, distinct
from core.settings.config import Settings
from core.settings.sampling import Sampling

TEXT = [{"role": "user", "content": "hello there"}]
IDS = [3, 17, 42, 99]


def test_a_pass_goes_to_its_own_step_and_all_others_to_the_usual_one() -> None:
    called: list[str] = []

    def step(name: str) -> Any:
        return lambda layer, hidden, ids, weights: called.append(name)

    site: Any = type("Site", (), {"index": 0})
    dispatch, other = StepDispatch(step("usual")), step("other")
    nothing = torch.empty(0)
    with dispatch.to(other):
        dispatch(site, nothing, nothing, nothing)
    dispatch(site, nothing, nothing, nothing)
    with pytest.raises(TypeError), dispatch.to(other):
        dispatch(site)  # type: ignore[call-arg]
    dispatch(site, nothing, nothing, nothing)
    assert called == ["other", "usual", "usual"]


def test_experts_at_rest_are_looked_for_where_nothing_else_is_done_in_a_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, lookup = list[int](), engine.expert_cache.lookup_all_hits

    def heard(layer: int, wanted: Sequence[int]) -> Any:
        looked.append(layer)
        return lookup(layer, wanted)

    monkeypatch.setattr(engine.expert_cache, "lookup_all_hits", heard)
    for changes, looks in (
        ({"predictor": "none"}, True),
        ({"predictor": "gate"}, False),
        ({"predictor": "none", "miss": "drop"}, False),
        ({"miss": "wait"}, True),
    ):
        engine.change(changes)
        looked.clear()
        list(engine.generate(TEXT, Sampling(max_new_tokens=4)))
        assert bool(looked) == looks, changes
        assert not engine.wiring.answering.step._rests, "a pass that belongs to no pipeline looks for none"


def test_measuring_predicts_records_and_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While answers are computed lossily and with a predictor; both are as they were afterwards."""
    engine.change({"miss": "drop", "predictor": "gate"})
    list(engine.generate(TEXT, Sampling(max_new_tokens=4)))
    predicted: list[int] = []
    predict = engine.predictor_host.predict

    def heard(layer: int, *args: Any) -> Sequence[Any]:
        predicted.append(layer)
        return predict(layer, *args)

    monkeypatch.setattr(engine.predictor_host, "predict", heard)
    before = engine.parts.recorder.index, engine.frame().columns["step"].tolist()
    with engine.workbench("test") as bench:
        lossless = bench.run(IDS, bench.kv.fresh(), keep=len(IDS)).clone()
        assert bench.missed(), "nothing was missing: the test shows nothing"
    assert (engine.parts.recorder.index, engine.frame().columns["step"].tolist()) == before
    assert not predicted
    steps = [piece.step for piece in engine.generate(TEXT, Sampling(max_new_tokens=4)) if piece.step is not None]
    assert predicted
    assert any(step.changed for step in steps)
    engine.change({**Settings(), "budget": "all"})
    with engine.workbench("test") as bench:
        assert torch.equal(bench.run(IDS, bench.kv.fresh(), keep=len(IDS)), lossless)


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_are_the_same_in_whatever_order_experts_land(engine: Engine, tokens: int) -> None:
    shape, generator = engine.shape, torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, shape.hidden, generator=generator).to(next(engine.model.parameters()).dtype)
    asked = [torch.randperm(shape.experts, generator=generator)[: shape.top_k].tolist() for _ in range(tokens)]
    weights = torch.rand(tokens, shape.top_k, generator=generator).to(hidden.dtype)
    routed = Routed(torch.tensor(asked), weights, asked, distinct(asked), asked)
    engine.change({"budget": "all"})
    results = []
    with torch.inference_mode():
        lease = engine.expert_cache.acquire(0, routed.wanted)
        for held in lease.segments:
            if held.ticket is not None:
                engine.transfers.wait(held.ticket)
        for order in (lease.segments, lease.segments[::-1]):
            rows = (TokenRows if tokens == 1 else PromptRows)(engine.wiring.math[0], hidden, routed)
            for one in order:
                rows.compute([one])
            results.append(rows.combined())
        engine.expert_cache.release(lease)
    assert torch.equal(*results)
