"""Answers and measuring run passes of their own over one model and one cache; neither shows in the other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import core
from core.engine import Engine
from core.runtime.pipeline import StepDispatch
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


def test_all_hits_are_looked_up_where_nothing_else_is_done_in_a_pass(
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
        assert not engine.wiring.answering.step._looks_up, "a pass that belongs to no pipeline looks for none"


def test_resident_experts_are_a_short_way_from_the_hook(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of core in which something is called for a layer of one token, in docs/architecture.md's order."""
    engine.change({"budget": "all", "predictor": "none"})
    call, root, ways = StepDispatch.__call__, str(Path(core.__file__).parent), list[tuple[str, ...]]()

    def followed(*args: Any) -> torch.Tensor:
        files: dict[str, None] = {}

        def enter(frame: FrameType, event: str, arg: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(root):
                files[frame.f_code.co_filename.removeprefix(root)] = None

        sys.setprofile(enter)
        try:
            return call(*args)
        finally:
            sys.setprofile(None)
            ways.append(tuple(files))

    monkeypatch.setattr(StepDispatch, "__call__", followed)
    with engine.workbench("test") as bench:
        for _ in range(2):  # the second time each expert's lease is known
            kv = bench.kv.fresh()
            bench.run(IDS, kv)
            ways.clear()
            bench.run([5], kv, "decode")
    assert len(ways) == engine.shape.layers and all(len(way) <= 15 for way in ways), ways
    assert not [file for way in ways for file in way if "session" in file], "nothing calls up"


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
