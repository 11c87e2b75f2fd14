"""What the user's own answers say of the next ones, and that the speed said before a load follows."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest

from app.services.analysis.sources import RoutingSource, from_store
from app.services.host import Host
from app.services.own_answers import ENOUGH, OwnAnswers
from app.store import Store
from core.capacity import forecast
from core.capacity.forecast import replayed
from core.importing import import_model
from core.memory.link import Link, measure_gbps
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.types import Fit, Transfer
from tests.app.conftest import WAIT_S, ended, open_store
from tests.app.records import SHAPE, a_step
from tests.fake_models import fake_estimate

SETTINGS = {"budget": "50%", "eviction": "lru", "link": "own"}
LINK = {"link": "measured", "link_gbps": 2.0}


def used(store: Store, tokens: int, *, ms: float = 20.0, settings: object = None, spec: object = None) -> int:
    chosen = Settings({**SETTINGS, **(settings or {})})  # type: ignore[dict-item]
    about = {**LoadSpec().describe(), **(spec or {})}  # type: ignore[dict-item]
    manifest = {**LINK, "model_hash": "", "settings": dict(chosen)}
    load = store.steps.add_load("demo", about, dict(chosen), SHAPE, manifest)
    decode(store, load, tokens, ms=ms)
    return load


def decode(
    store: Store,
    load: int,
    tokens: int,
    *,
    ms: float = 20.0,
    first: int = 0,
    changes: dict[str, object] | None = None,
    routed: bool = True,
) -> None:
    for index in range(first, first + tokens):
        one = a_step(index)
        step = replace(
            one,
            ids=one.ids if routed else one.ids[:0],
            total_ms=ms,
            compute_ms=ms - 4.0,
            stall_ms=4.0,
            slots=8,
            exact=True,
            outcome=np.array([0, 3, 3, 1], np.uint8),
            transfers=(Transfer(1, 7, 100, True, 1.0, 1.0, 1.002, "decode"),),
            changes=changes or {},
        )
        store.steps.add(load, None, None, step, {})
        changes = None


def own(store: Store, current: dict[str, object] | None = None) -> OwnAnswers:
    return OwnAnswers(store, lambda: current, lambda model_hash: None)


def asked(**changes: object) -> LoadSpec:
    return LoadSpec(settings=Settings({**SETTINGS, **changes}))


def told(store: Store, spec: LoadSpec, slots: int = 8) -> Fit:
    return own(store).measured(spec, replace(fake_estimate(spec), slots=slots))


def test_answers_with_the_very_settings_are_the_estimate_also_after_a_restart(store: Store, tmp_path: Path) -> None:
    used(store, 32)
    store.close()
    fit = told(open_store(tmp_path), asked())
    assert fit.tok_s_low < 50.0 < fit.tok_s_high < 1.15 * 50
    assert fit.hit_low == fit.hit_high == pytest.approx(0.5)
    assert fit.basis.startswith("measured: the last 32 tokens of 1 of your answers")


def test_a_text_to_text_model_s_answers_are_the_estimate_though_their_routing_is_not_recorded(store: Store) -> None:
    decode(store, used(store, 0), 32, routed=False)
    assert "measured: the last 32 tokens" in told(store, asked()).basis
    assert own(store).seen(asked()).trace is None, "and nothing is replayed"


@pytest.mark.parametrize(
    "change",
    [{"eviction": "lfu"}, {"predictor": "previous_token"}, {"link": "emulated"}, {"miss": "drop"}, {"scope": "global"}],
)
def test_answers_with_other_settings_are_not(store: Store, change: dict[str, object]) -> None:
    used(store, 32)
    spec = asked(**change)
    assert told(store, spec) == replace(fake_estimate(spec), slots=8)


def test_neither_are_answers_of_another_size_form_or_number(store: Store) -> None:
    used(store, 32, spec={"format": "int8"})
    used(store, 32, spec={"threads": 3})
    used(store, 32, spec={"blocks": 3})
    used(store, 32, spec={"arithmetic": "fast"})
    used(store, 32, spec={"arithmetic": "reference"})  # as in earlier versions, which had no other
    used(store, ENOUGH - 1)
    assert "measured" not in told(store, asked()).basis
    used(store, 32)
    assert "measured" in told(store, asked()).basis
    assert "measured" not in told(store, asked(), slots=9).basis


def test_a_setting_turned_in_between_parts_the_answers(store: Store) -> None:
    load = used(store, 30)
    decode(store, load, 40, ms=40.0, first=30, changes={"eviction": "lfu"})
    assert told(store, asked()).tok_s_high == pytest.approx(50 / 0.9)
    assert told(store, asked(eviction="lfu")).tok_s_high == pytest.approx(25 / 0.9)


def test_other_settings_are_replayed_with_the_times_of_these_answers(store: Store) -> None:
    used(store, 32)
    seen = own(store).seen(asked(eviction="lfu"))
    assert seen.trace is not None and seen.trace.shape == (32, 2, 2)
    assert seen.clock is not None and seen.passes == 32 and seen.error < 0.05
    assert seen.clock.compute_ms + 2 * seen.clock.miss_ms == pytest.approx(16.0)
    paced = own(store).seen(asked(link="emulated", link_gbps=0.001, link_latency_us=0.0))
    assert paced.link == Link(0.001, 0.0, True)
    assert paced.clock is not None and paced.clock.load_ms == pytest.approx(0.1), "100 bytes over that link"


def test_the_link_is_the_loaded_models_or_else_its_last_loads(store: Store) -> None:
    assert own(store).seen(asked()).link is None
    load = used(store, 1)
    assert own(store).seen(asked()).link == Link(2.0)
    loaded = {"model": "demo", "link": "measured", "link_gbps": 3.5, "settings": {"link": "own"}}
    assert own(store, loaded).seen(asked()).link == Link(3.5)
    assert own(store, loaded).seen(asked(link="auto")).link is None, "that may be another one"
    fields = {"link": "emulated", "link_gbps": 0.25, "link_latency_us": 10.0, "settings": {"link": "auto"}}
    store.steps.relink(load, fields)
    assert own(store).seen(asked(link="auto")).link == Link(0.25, 10.0, True)


def test_a_link_changed_while_answers_are_written_is_the_one_that_is_recorded(host: Host, tmp_path: Path) -> None:
    ended(host.chats.ask(None, "one"))
    assert host.models.change_many({"link": "emulated", "link_gbps": 0.5}) == ""
    ended(host.chats.ask(None, "two"))
    now, frame = host.models.manifest(), host.models.frame()
    assert now is not None and Link.read(now) == Link(0.5, 10.0, True)
    assert frame is not None and frame.emulated
    assert host.models.load_id is not None
    routing = from_store(host.store, RoutingSource("load", host.models.load_id), tmp_path / "a.trace")
    assert routing.link == "emulated link, 0.5 GB/s"
    assert host.models.change("link", "own") == ""
    ended(host.chats.ask(None, "three"))
    routing = from_store(host.store, RoutingSource("load", host.models.load_id), tmp_path / "b.trace")
    assert "emulated" not in routing.link


def test_the_chosen_policy_is_the_one_that_is_replayed(store: Store) -> None:
    """Three experts by turns and one always, two of them resident: LRU and LFU keep the one, no cache keeps nothing."""
    used(store, 1)
    seen = own(store).seen(asked())
    trace = np.array([[[0, 1 + at % 3]] for at in range(60)], np.int16)
    rates = {}
    for policy in ("lru", "lfu", "none"):
        found = replayed(trace, 4, 2, Settings({**SETTINGS, "eviction": policy}), 100, seen)
        rates[policy] = found.hit
    assert rates["lfu"] == rates["lru"] == pytest.approx(0.5) and rates["none"] < 0.5
    assert replayed(trace, 4, 1, Settings(SETTINGS), 100, seen) is None, "too few for a token"


def test_what_is_damaged_is_left_out_and_keeps_nobody_from_loading(store: Store) -> None:
    load = used(store, 32)
    with store.db.tx() as db:
        db.execute("UPDATE steps SET ids = x'00', outcome = 7, transfers = x'0102' WHERE load = ?", (load,))
    assert own(store).seen(asked()).trace is None
    assert "measured" not in told(store, asked()).basis


DEMO = Path(__file__).parents[2] / "assets" / "demo"
QUESTIONS = [json.loads(line)["question"] for line in (DEMO / "questions.jsonl").read_text("utf-8").splitlines()]
ASKED = QUESTIONS[:: len(QUESTIONS) // 12][:12]
WITHIN = 0.25


class Case(NamedTuple):
    """A configuration: the pack or the demo itself, and its settings."""

    pack: bool
    settings: dict[str, object]


CASES = (
    Case(False, {"budget": "25%"}),
    Case(False, {"budget": "50%", "eviction": "lfu"}),
    Case(False, {"budget": "75%", "scope": "global"}),
    Case(False, {"budget": "50%", "predictor": "previous_token"}),
    Case(True, {"budget": "25%"}),
    Case(True, {"budget": "75%", "eviction": "lfu"}),
)
PLAIN = {"budget": "50%", "eviction": "lru", "scope": "layer", "predictor": "none"}


@contextmanager
def started(folder: Path) -> Iterator[Host]:
    forecast._measured.clear()
    measure_gbps.cache_clear()
    host = Host(Store(folder))
    assert host.chats.set_sampling(max_new_tokens=64, temperature=0.0) == ""
    try:
        yield host
    finally:
        host.close()


def answered(host: Host, model: str, settings: dict[str, object]) -> tuple[Fit, float]:
    """What is said of a configuration, and tokens a second of the answers that follow."""
    assert host.models.change_many({**PLAIN, **settings}) == ""
    spec = host.loader.plan(model, context=1024)
    fit = host.loader.estimate(spec)
    loading = host.loader.load(spec)
    assert loading.join(WAIT_S) and not loading.error, loading.error
    for question in ASKED:
        assert ended(host.chats.ask(None, question)).error == ""
    steps = [s for s in host.store.steps.records(load=host.models.load_id) if s.phase == "decode"]
    return fit, 1e3 * len(steps) / sum(s.total_ms for s in steps)


def off(fit: Fit, tok_s: float) -> float:
    return (fit.tok_s_low * fit.tok_s_high) ** 0.5 / tok_s - 1


@pytest.mark.long(2)
def test_what_is_said_before_a_load_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {False: "demo", True: str(import_model(str(DEMO), tmp_path / "pack", format="int4-g32"))}
    lines, errors = list[str](), list[float]()
    for phase in ("before", "after"):
        with started(tmp_path / "home") as host:
            if phase == "before":
                for model in models.values():
                    answered(host, model, {})  # at 50 %, so that there are answers to go by
            for case in CASES:
                fit, tok_s = answered(host, models[case.pack], case.settings)
                what = ", ".join(str(value) for value in case.settings.values())
                lines.append(
                    f"{phase:6} {'int4 pack' if case.pack else 'demo':9} {what:20} {fit.tok_s_low:6.1f} to "
                    f"{fit.tok_s_high:6.1f} tok/s, then {tok_s:6.1f} ({off(fit, tok_s):+.0%}): {fit.basis}"
                )
                errors.append(abs(off(fit, tok_s)))
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert median(errors) <= WITHIN, "\n".join(lines)
