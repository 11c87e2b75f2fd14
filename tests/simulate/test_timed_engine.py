"""The simulator with prefetching against the engine: the same trace and settings, event by event.

Timing is made repeatable in three ways (tests.simulate.links): a link on which every copy is over before the next thing
happens; one on which no prefetch ever starts, so that none lands in time; and virtual time under the engine, whose
clock moves by a second a layer, where some prefetches land, some are late, and some are taken back or promoted."""

from pathlib import Path
from typing import Any

import pytest

from core.engine import Engine
from core.memory.ticket import Ticket
from core.policy.prefetch.guard import MARGIN
from core.profile.trace import FileTrace
from core.settings.config import Settings
from core.simulate import Clock, Config
from core.simulate.prefetchers import TimedConfig, follow, predictor_for
from core.types import StepRecord
from tests.engine.profiles import drawn_profile
from tests.prediction.held import held_until
from tests.selection import layered
from tests.simulate.links import LAYER_S, Counted, Demanded, Instant, Never, written_down
from tests.simulate.test_engine import QUESTIONS, recorded, restart

START = {**Settings({"budget": "50%", "link": "own"})}
COUNTS = (*(f"prefetch_{name}" for name in ("issued", "used", "late", "wasted", "evicted")), "bypassed")
ON_IDS = ["none", "all_next", "previous_token", "recent", "request", "transitions"]
ALL = [*ON_IDS, "gate"]  # the gate's guesses are recorded and replayed: it looks at hidden states
Events = list[tuple[Any, ...]]


def lived(engine: Engine, settings: dict[str, object], link: Any, path: Path) -> tuple[Events, list[StepRecord]]:
    """Answer the questions over `link`, from a cache as after a load; the routing is recorded."""
    engine.change({**START, **settings})
    restart(engine)
    engine.predictor_host.use(*engine.settings.prefetch.predictor, engine.profile)  # it has learnt nothing yet
    expert_cache, recorder, kept = engine.expert_cache, engine.parts.recorder, engine.transfers
    step = engine.wiring.answering.step
    recorder.forget()
    expert_cache.prefetch_queue.schedule.rhythm.__init__(engine.shape.layers)  # type: ignore[misc]
    expert_cache.copies.link = step.transfers = recorder._transfers = link
    engine.keep(probs=False, ranks=True, tokens=False)
    try:
        with written_down(link) as events:
            steps = recorded(engine, path, QUESTIONS, 8)
    finally:
        engine.keep(probs=False, ranks=False, tokens=False)
        for eid in list(expert_cache.copies.tickets):  # what is queued there is never copied
            if not link.landed(expert_cache.copies.tickets[eid]):
                expert_cache.core.evict(eid)
        expert_cache.copies.link = step.transfers = recorder._transfers = kept
    return events, steps


def replayed(engine: Engine, path: Path, link: Any, load_s: float) -> tuple[Events, dict[str, int]]:
    """The same trace in the simulator, on `link` if one is given."""
    settings, trace = engine.settings, FileTrace(path)
    slots, rules = engine.expert_cache.slots, settings.prefetch
    cache = Config.of(settings, slots, trace.layers, trace.experts, trace.top_k, engine.profile)
    one = TimedConfig(cache, *rules.predictor, rules.deadline, rules.guard, rules.beside)
    clock = Clock(compute_ms=1e3 * LAYER_S * trace.layers, load_ms=1e3 * load_s, expert_ms=0.0)
    course = follow(trace, one, clock, engine.sizes.blob, predictor_for(one, trace), start="filled")
    if link is not None:
        course.link = course.expert_cache.copies.link = link
    with written_down(course.link) as events:
        sums = course.run()
    return events, {name: sum(getattr(s.counts, name) for s in sums.values()) for name in COUNTS}


def compare(engine: Engine, settings: dict[str, object], real: Any, virtual: Any, load_s: float, path: Path) -> Events:
    events, steps = lived(engine, settings, real, path)
    again, counts = replayed(engine, path, virtual, load_s)
    assert len(events) == len(again)
    assert events == again
    assert counts == {name: sum(getattr(step, name) for step in steps) for name in COUNTS}
    return events


def met(events: Events) -> set[str]:
    return {
        word
        for event in events
        for word in ([event[0]] if isinstance(event[0], str) else [outcome for _, outcome in event[1:]])
    }


@pytest.mark.parametrize("name", layered(ALL, quick=lambda name: name == "gate"))
def test_where_every_copy_is_over_before_the_next_layer(demo: Engine, name: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"predictor": name, "prefetch_guard": False}  # so that every predictor fetches some
    events = compare(demo, settings, Instant(demo), None, 0.0, tmp_path / "t")
    wanted = {"HIT", "MISS", "demand"} if name == "none" else {"HIT", "MISS", "PREFETCH_HIT", "demand", "prefetch"}
    assert wanted <= met(events) and "PARTIAL_HIT" not in met(events)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("name", layered(["all_next", "transitions", "gate"], quick=lambda name: name == "gate"))
def test_where_no_prefetch_ever_lands_in_time(demo: Engine, name: str, tmp_path: Path) -> None:
    events = compare(demo, {"predictor": name}, Demanded(demo), Never(0.0), 0.0, tmp_path / "t")
    assert {"HIT", "MISS", "demand", "prefetch", "promote"} == met(events)


QUICK: list[dict[str, object]] = [
    {"predictor": "all_next", "prefetch_deadline": True, "scope": "global"},
    {"predictor": "all_next", "eviction": "lfu", "bypass": True, "prefetch_beside": True},
]


@pytest.mark.parametrize(
    "settings",
    layered(
        [
            *({"predictor": name} for name in ALL),
            {"predictor": "gate", "prefetch_deadline": True},
            {"predictor": "transitions", "predictor.distance": 3},
            {"predictor": "gate", "scope": "global"},
            {"predictor": "all_next", "prefetch_deadline": True, "scope": "global"},
            {"predictor": "gate", "eviction": "plec"},
            {"predictor": "recent", "eviction": "finemoe", "budget": "30%"},
            {"predictor": "gate", "eviction": "lfu", "budget": "30%", "bypass": True},
            {"predictor": "random", "eviction": "lfru"},
            *(
                {"predictor": name, "eviction": "lfu", "bypass": True, "prefetch_beside": True}
                for name in ("gate", "all_next", "previous_token")
            ),
            *({"predictor": name, "prefetch_guard": False} for name in ("all_next", "gate", "request")),
            {"predictor": "gate", "eviction": "plec", "scope": "global", "prefetch_guard": False},
        ],
        quick=lambda one: one in QUICK,
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_some_land_some_are_late_some_never_start(demo: Engine, settings: dict[str, object], tmp_path: Path) -> None:
    load_s = 0.45 * LAYER_S
    events = compare(demo, settings, Counted(demo, load_s), None, load_s, tmp_path / "t")
    if settings["predictor"] in ("gate", "all_next") and settings.get("prefetch_guard") is False:
        assert {"HIT", "MISS", "PARTIAL_HIT", "PREFETCH_HIT", "demand", "prefetch"} <= met(events)


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    "layer", layered([0, 2, 4], quick=lambda layer: layer == 2), ids=lambda layer: f"held-until-{layer}"
)
@pytest.mark.parametrize(
    "settings",
    layered(
        [
            {"predictor": "expert_map", "eviction": "finemoe", "scope": "global"},
            {"predictor": "expert_map", "eviction": "lru"},
            {"predictor": "routing_path", "eviction": "plec", "scope": "global"},
        ],
        quick=lambda settings: settings["eviction"] != "lru",
    ),
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_late_answers_are_replayed_late(demo: Engine, settings: dict[str, object], layer: int, tmp_path: Path) -> None:
    """Prefetches, what the eviction policy is told, and so every hit: what a search found for layers already passed
    prefetches nothing, and is still told."""
    demo.use_profile(drawn_profile(demo))
    load_s = 0.45 * LAYER_S
    try:
        with held_until(layer):
            events = compare(demo, settings, Counted(demo, load_s), None, load_s, tmp_path / "t")
    finally:
        demo.change(START)
        demo.use_profile(None)
    assert "prefetch" in met(events)
    ranked = [chunk.ranked for chunk in FileTrace(tmp_path / "t").chunks() if chunk.ranked is not None]
    assert {at for rows in ranked for at in rows["at"].tolist()} and all((rows["at"] >= layer).all() for rows in ranked)
    assert all((rows["layer"] > rows["at"]).all() for rows in ranked)


@pytest.mark.long(0.1)
def test_in_a_running_engine_unlikely_prefetches_leave_residents_alone(demo: Engine, tmp_path: Path) -> None:
    """All experts of the next layer are named, most of them unlikely."""
    queue = demo.expert_cache.prefetch_queue

    def displaced(guard: bool) -> tuple[list[tuple[float, float]], int]:
        """(probability of a prefetch, rate of the expert that left for it) of each, and the bytes wasted."""
        link, found = Counted(demo, 0.05 * LAYER_S), list[tuple[float, float]]()
        submit = link.submit

        def noted(ticket: Ticket) -> Ticket:
            if ticket.displaced >= 0 and not ticket.demand:
                found.append((ticket.score, queue.guard.rate(ticket.displaced)))
            return submit(ticket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "submit", noted)
            _, steps = lived(demo, {"predictor": "all_next", "prefetch_guard": guard}, link, tmp_path / "t")
        return found, sum(step.wasted_bytes for step in steps)

    (guarded, less), (old, more) = displaced(True), displaced(False)
    assert guarded and all(score >= 1.0 or score > MARGIN * rate for score, rate in guarded)
    assert sum(score < rate for score, rate in old) > 10, len(old)
    assert less < more / 2
