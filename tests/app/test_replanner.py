"""Plans while idle: after enough tokens, from the session's own, put into use if better, and given up for an answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.server.live_state import jobs_state
from app.services import plan_basis, planner, replanner
from app.services.host import Host
from app.services.plan_basis import RoutedTokens
from app.services.progress import Answer
from app.ui.tabs.calibrate_plan import PlanPanel
from core.metrics import StepRecord
from core.policy.allocation.configurator import plans
from core.profile.trace import ArrayTrace
from core.profile.trace.chunk import RANKED
from core.simulate import Config
from core.simulate.curves import measure_curves
from core.simulate.run import maker
from tests.app.conftest import WAIT_S, GatedEngine, ended, follow, open_host, page
from tests.app.test_planner import engine_of, measured
from tests.fake_models import SHAPE

AGAIN, ANSWER = 24, 12  # tokens


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanner, "AGAIN", AGAIN)
    monkeypatch.setattr(plan_basis, "ENOUGH", AGAIN)


@pytest.fixture
def slow(host: Host) -> Host:
    """A slow link, so that there is something to wait for."""
    linked(host)
    return host


def linked(host: Host) -> None:
    profile = measured()
    assert profile.times is not None
    engine_of(host).use_profile(replace(profile, times={**profile.times, "moe": 0.05, "att": 0.05}))
    assert host.models.change_many({"link": "emulated", "link_gbps": 0.1}) == ""


def answers(host: Host, number: int) -> None:
    with looked(host) as looks:
        for _ in range(number):
            ended(host.chats.ask(None, "hello"))
            assert looks.acquire(timeout=WAIT_S)
    assert host.replanner.wait_idle(WAIT_S)


@contextmanager
def looked(host: Host) -> Iterator[threading.Semaphore]:
    looks, look = threading.Semaphore(0), host.replanner.look

    def told() -> None:
        look()
        looks.release()

    host.replanner.look = told  # type: ignore[method-assign]
    yield looks
    host.replanner.look = look  # type: ignore[method-assign]


def step(ids: Any, phase: str = "decode", ranked: Any = None, changes: Any = None) -> StepRecord:
    """A pass over `ids` [L, T, k], with RANKED rows; the rest is not set."""
    record = StepRecord.__new__(StepRecord)
    record.phase, record.tokens, record.ids = phase, ids.shape[1], ids  # type: ignore[assignment]
    record.ranked, record.changes = ranked, changes or {}
    return record


def test_routing_is_kept_of_one_load_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, rng = RoutedTokens(), np.random.default_rng(0)
    ids = rng.integers(0, 16, (9, 3, 1, 2)).astype(np.int16)
    monkeypatch.setattr(plan_basis, "MOST", 5)
    for one in ids:
        kept.add(1, step(one), 16)
        kept.add(1, step(one.repeat(2, 1), "prefill"), 16)
    assert kept.tokens(1) == 9 and kept.tokens(2) == 0 and kept.snapshot(2) is None
    assert np.array_equal(kept.snapshot(1).ids, ids[4:, :, 0])  # type: ignore[union-attr]
    kept.add(2, step(ids[0]), 16)
    assert kept.tokens(1) == 0 and kept.tokens(2) == 1
    monkeypatch.setattr(plan_basis, "MOST_BYTES", 3 * ids[0].nbytes)
    for one in ids:
        kept.add(3, step(one), 16)
    assert len(kept.snapshot(3).ids) == 3  # type: ignore[union-attr]


def test_rankings_are_of_the_last_tokens_and_of_one_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, experts, kept = 2, 4, RoutedTokens()
    ids = np.zeros((layers, 1, 1), np.int16)

    def ranked(*rows: tuple[int, int, int]) -> Any:
        """(made in which layer, of which, expert), the likeliest first."""
        return np.array([(0, *row, 1 - at / 10) for at, row in enumerate(rows)], RANKED)

    def rankings() -> list[list[list[int]]]:
        return kept.snapshot(1).ranked.tolist()  # type: ignore[union-attr]

    kept.add(1, step(ids), experts)
    assert rankings() == []
    kept.add(1, step(ids.repeat(2, 1), "prefill", ranked((0, 1, 2), (1, 0, 3), (1, 0, 1))), experts)
    kept.add(1, step(ids, ranked=ranked((0, 1, 2), (0, 1, 0), (1, 0, 2))), experts)
    kept.add(1, step(ids, ranked=ranked((0, 1, 3))), experts)
    first, second = [[3, 1, -1, -1], [2, 0, -1, -1]], [[2, -1, -1, -1], [3, -1, -1, -1]]
    assert rankings() == [first, second]
    monkeypatch.setattr(plan_basis, "MOST", 1)
    for _ in range(2):
        kept.add(1, step(ids, ranked=ranked((0, 1, 1)), changes={"predictor.width": 8}), experts)
        assert rankings() == [[[-1] * 4, [1, -1, -1, -1]]]
    kept.add(1, step(ids, ranked=ranked((0, 1, 2))), experts)
    assert rankings() == [[[-1] * 4, [2, -1, -1, -1]]]
    kept.add(1, step(ids), experts)
    assert rankings() == []


def test_a_plan_is_from_the_sessions_own_tokens(slow: Host) -> None:
    assert slow.planner.propose().known.basis == "from calibration"
    answers(slow, AGAIN // ANSWER)
    known = slow.planner.propose().known
    assert known.basis == f"from {AGAIN} tokens of this session"
    routed = slow.routed.snapshot(slow.models.load_id)
    assert routed is not None
    replayed = measure_curves(ArrayTrace(routed.ids, SHAPE.experts), maker(Config("lcp", 2)))
    assert np.allclose(known.curves.hit, replayed.hit)
    calibrated = measured().curves()
    assert calibrated is not None and np.allclose(known.curves.chosen, calibrated.chosen)


def test_while_it_plans_by_itself_predictions_are_the_sessions(slow: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanner, "AGAIN", 10 * AGAIN)
    assert slow.models.change("predictor", "gate") == ""
    answers(slow, 1)
    slow.replanner.switch(True)
    answers(slow, AGAIN // ANSWER - 1)
    calibrated, known = measured().curves(), slow.planner.propose().known
    assert calibrated is not None and np.allclose(known.curves.chosen, calibrated.chosen), "too few have rankings"
    answers(slow, 1)
    known = slow.planner.propose().known
    assert known.basis == f"from {AGAIN + ANSWER} tokens of this session and what was predicted for the last {AGAIN}"
    routed = slow.routed.snapshot(slow.models.load_id)
    assert routed is not None and len(routed.ranked) == AGAIN
    places = SHAPE.experts - 1 - routed.ids[-AGAIN:]  # of each expert in the fake engine's ranking
    right = np.stack([np.bincount(layer.ravel(), minlength=SHAPE.experts) for layer in places.transpose(1, 0, 2)])
    chosen = known.curves.chosen
    assert np.allclose(chosen[1:], right[1:, : chosen.shape[1]] / AGAIN)
    assert np.allclose(chosen[0], right[0, : chosen.shape[1]] / AGAIN, atol=1 / AGAIN), "the first has no layer 0"
    assert known.curves.cached.max() <= 1 and known.curves.cached[:, -1].min() > 0.9
    slow.replanner.switch(False)
    answers(slow, 1)
    assert "predicted" not in slow.planner.propose().known.basis


def test_a_prefetcher_that_names_nothing_leaves_calibrations(slow: Host) -> None:
    assert slow.models.change("predictor", "none") == ""
    slow.replanner.switch(True)
    answers(slow, 3 * AGAIN // ANSWER)
    calibrated, known = measured().curves(), slow.planner.propose().known
    assert "predicted" not in known.basis and calibrated is not None
    assert np.allclose(known.curves.chosen, calibrated.chosen)


def test_hit_curves_of_calibration_are_not_needed_then(slow: Host) -> None:
    answers(slow, AGAIN // ANSWER)
    profile = replace(measured(), curve_hit=None, curve_chosen=None, curve_cached=None)
    engine_of(slow).use_profile(profile)
    known = slow.planner.propose().known
    assert "of this session" in known.basis and known.curves.chosen.size == 0
    recall = np.array([np.nan, 0.5, 0.5, 0.5], np.float32)
    engine_of(slow).use_profile(replace(profile, gate_recall=recall, similarity=recall[1:]))
    assert slow.planner.propose().known.curves.recall.tolist() == pytest.approx([0, 0.5, 0.5, 0.5])


def test_off_by_default_and_nothing_runs(slow: Host) -> None:
    answers(slow, 2 * AGAIN // ANSWER)
    assert not slow.replanner.on and slow.replanner.last is None and slow.planner.used is None


def test_a_better_plan_is_used_while_idle_and_taken_back(slow: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanner, "MARGIN", -1.0)  # any plan is good enough
    with page():
        panel = PlanPanel(slow)
    slow.replanner.switch(True)
    before = jobs_state(slow)["calibration"]["stamp"]
    answers(slow, AGAIN // ANSWER - 1)
    assert slow.replanner.last is None
    answers(slow, 1)
    done = slow.replanner.last
    assert done is not None and f"After {AGAIN} tokens: a new plan was put into use" in done.text
    assert slow.models.settings["layer_slots"] == "moepic" and slow.planner.used is not None
    assert jobs_state(slow)["calibration"]["stamp"] != before
    use, undo, said, _, on, told = panel.values({"dark": True})
    assert not use["visible"] and undo["visible"] and "of this session" in said
    assert on and "Undo takes it back" in told
    panel._plan({"dark": True})
    mine = panel._proposal
    panel.values({"dark": False})
    assert mine is panel._proposal is not slow.planner.used.proposal, "what was planned since stays"
    answers(slow, 1)
    assert slow.replanner.last is done, "not due again"
    panel._undo({"dark": True})
    assert slow.models.settings["layer_slots"] == "uniform" and slow.planner.used is None


def test_plans_are_taken_back_one_after_the_other(slow: Host) -> None:
    for _ in range(2):
        slow.planner.use(slow.planner.propose())
    slow.planner.undo()
    assert slow.planner.used is not None and slow.models.settings["layer_slots"] == "moepic"
    slow.planner.undo()
    assert slow.planner.used is None and slow.models.settings["layer_slots"] == "uniform"


def test_a_plan_that_is_not_clearly_better_is_not_used(slow: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanner, "MARGIN", 1.0)
    slow.replanner.switch(True)
    answers(slow, AGAIN // ANSWER)
    done = slow.replanner.last
    assert done is not None and "left as it was" in done.text and slow.planner.used is None
    slow.models.unload()
    assert slow.replanner.last is None, "it was of another load"


def test_what_is_missing_is_said(host: Host) -> None:
    host.replanner.switch(True)
    answers(host, AGAIN // ANSWER)
    assert host.replanner.last is not None and "not planned again: A plan follows from" in host.replanner.last.text


def test_the_switch_is_remembered(tmp_path: Path) -> None:
    for on in (True, False):
        host = open_host(tmp_path, loaded=False)
        host.replanner.switch(on)
        host.close()
        host = open_host(tmp_path, loaded=False)
        assert host.replanner.on is on
        host.close()


def test_an_answer_stops_planning(gated_host: Host, gated: type[GatedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    host, begun = gated_host, list[Answer]()
    linked(host)
    monkeypatch.setattr(replanner, "AGAIN", ANSWER)
    monkeypatch.setattr(replanner, "MARGIN", -1.0)

    def interrupted(*inputs: Any, **how: Any) -> Iterator[Any]:
        for one in plans(*inputs, **how):
            if not begun:  # an answer is asked for in the middle of the first plan
                begun.append(host.chats.ask(None, "quick"))
                follow(begun[0], lambda answer: answer.state == "prefill")
            yield one

    monkeypatch.setattr(planner, "plans", interrupted)
    host.replanner.switch(True)
    with looked(host) as looks:
        gated.gate.release(ANSWER + 1)
        ended(host.chats.ask(None, "hello"))
        assert looks.acquire(timeout=WAIT_S) and host.replanner.wait_idle(WAIT_S)
        assert begun and not begun[0].finished and host.replanner.last is None and host.planner.used is None
        gated.gate.release(ANSWER + 1)
        ended(begun[0])
        assert looks.acquire(timeout=WAIT_S) and host.replanner.wait_idle(WAIT_S)
    assert host.replanner.last is not None and host.planner.used is not None and host.planner.used.idle
