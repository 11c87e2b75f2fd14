"""Answers and measuring run passes of their own over one model and one cache; neither shows in the other."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import core
from core.cache.lease import LeasedSegment
from core.engine import Engine
from core.runtime import moe_step
from core.runtime.pipeline import StepDispatch
from core.runtime.rows import ExpertRows, compute_all_hits
from core.settings.config import Settings
from core.settings.sampling import Sampling
from core.types import Outcome, Segment
from tests.decoded import passes_of
from tests.selection import layered

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


def test_all_hits_are_looked_up_where_nothing_else_is_done(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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


LeasedBatches = list[list[LeasedSegment]]


def check_there(engine: Engine, some: Sequence[LeasedSegment]) -> None:
    table, landed = engine.expert_cache.core.table, engine.transfers.landed
    for leased in some:
        assert leased.ticket is None or landed(leased.ticket), "computed before its copy landed"
        assert leased.slots == table[leased.segment.eid]
        under_way = engine.expert_cache.copies.tickets.get(leased.segment.eid)  # forgotten once landed
        assert under_way in (None, leased.ticket), "another copy goes there"


@contextmanager
def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LeasedBatches, LeasedBatches]]:
    """Inside, notes the leased segments that are to be computed, lease by lease, and the batches that are."""
    taken: LeasedBatches = []
    computed: LeasedBatches = []
    batches, compute = ExpertRows.batches, ExpertRows.compute

    def divided(self: ExpertRows, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        taken.append(list(segments))
        return batches(self, segments)

    def checked(self: ExpertRows, batch: Sequence[LeasedSegment]) -> None:
        check_there(engine, batch)
        computed.append(list(batch))
        compute(self, batch)

    def all_hits(math: Any, segments: Sequence[LeasedSegment], *more: Any) -> Any:
        taken.append(list(segments))
        computed.append(list(segments))
        assert all(one.ticket is None for one in segments), "its copy would have to be waited for"
        check_there(engine, segments)
        return compute_all_hits(math, segments, *more)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertRows, "batches", divided)
        patch.setattr(ExpertRows, "compute", checked)
        patch.setattr(moe_step, "compute_all_hits", all_hits)
        yield taken, computed


@pytest.mark.parametrize(
    "changes",
    layered(
        [
            {},
            {"predictor": "all_next"},
            {"scope": "global", "budget": "40%", "predictor": "gate"},
            {"miss": "drop"},
            {"eviction": "none"},
        ],
        quick=lambda changes: {"scope", "miss"} & changes.keys(),
    ),
    ids=lambda changes: "-".join(map(str, changes.values())) or "plain",
)
def test_each_is_computed_once(engine: Engine, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.change(changes)
    blocks = engine.loaded.plan.codecs.blocks
    with watched(engine, monkeypatch) as (taken, computed):
        steps = passes_of(engine.generate(TEXT, Sampling(max_new_tokens=6)))
    leased = [one for some in taken for one in some]
    whole = range(blocks)
    for one in leased:
        assert one.segment.blocks == whole and len(one.slots) == blocks, "an expert is one segment"
        assert one.segment.eid % engine.shape.experts == one.expert
        if one.ticket is not None:
            assert one.ticket.segment == one.segment and tuple(one.ticket.slots) == tuple(one.slots)
            assert one.ticket.bytes == engine.sizes.blob
    assert sorted(map(id, leased)) == sorted(id(one) for some in computed for one in some), "each once"
    for some in computed:
        assert len(some) == 1 or all(one.ticket is None for one in some), "what is there is not held up by what is not"
    outcomes = [outcome for step in steps for outcome in step.outcome.tolist() if outcome <= Outcome.MISS_DISK]
    if "miss" not in changes:
        assert [one.outcome for one in leased] == outcomes
    missed = [one for one in leased if one.outcome in (Outcome.MISS, Outcome.MISS_DISK)]
    assert sum(step.demand_bytes for step in steps) == engine.sizes.blob * len(missed) > 0
    assert {one.outcome for one in leased} >= {Outcome.MISS} | (
        {Outcome.HIT} if changes.get("eviction") is None else set()
    )


def test_measuring_counts_its_own_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.parts.recorder.stall_s
    with watched(engine, monkeypatch) as (taken, computed), engine.workbench("test") as bench:
        bench.run([3, 17, 42], bench.kv.fresh())
        waited_ms = bench.stall_ms()
    assert len(taken) >= engine.shape.layers and len(computed) >= len(taken)
    assert waited_ms > 0 and engine.parts.recorder.stall_s == before


@pytest.mark.parametrize(
    "budget", layered(["25%", "50%", "all", "3MB", "1GB"], quick=lambda budget: budget in ("25%", "3MB"))
)
def test_slots_are_blocks(engine: Engine, budget: str) -> None:
    """Experts in two blocks of half the bytes take the same memory, in twice as many slots."""
    whole = engine.sizes
    halves = replace(whole, slot=whole.slot // 2, blocks=2)
    asked = Settings({"budget": budget}).cache.budget
    assert whole.slot % 2 == 0
    assert whole.slots(asked) == halves.slots(asked) // 2
    assert (whole.slots_all, 2 * whole.slots_all) == (whole.shape.total, halves.slots_all)
    assert 2 * whole.slots_min("global") == halves.slots_min("global") == halves.slots_min("layer")
    assert whole.bytes(whole.slots_min("global")) == halves.bytes(halves.slots_min("global"))
    assert whole.problem(asked, "global", 10**12) == halves.problem(asked, "global", 10**12)
    assert engine.shape.expert_bytes == engine.sizes.slot * engine.sizes.blocks


def test_the_arena_holds_blocks(engine: Engine) -> None:
    """What the cache's table maps to is what the arena allocated: a block's bytes per slot."""
    arena, core = engine.wiring.arena, engine.expert_cache.core
    taken = [slot for slots in core.table for slot in slots]
    assert len(arena) == engine.expert_cache.slots == engine.sizes.slots(engine.settings.cache.budget)
    assert arena.bytes == len(arena) * engine.sizes.slot
    assert all(slot.raw.numel() == engine.sizes.slot for slot in taken)
    assert [Segment(eid, range(len(slots))) for eid, slots in enumerate(core.table) if slots] == [
        engine.expert_cache.copies.whole[eid]
        for eid in range(engine.shape.total)
        if engine.expert_cache.is_resident(eid)
    ]
