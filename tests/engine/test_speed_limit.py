"""The speed limit of a loaded model and its parts, delays that are planted, and the one speed of the demo's link."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.capacity.plan import plan
from core.engine import Engine, kept_pace, wiring
from core.metrics.limit import COLUMNS, PARTS, Fewest, claims
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.engine.placement_history import HOSTED, engine_on
from tests.mixed_gguf import make_mixed
from tests.selection import layered

SLOW = {"link": "emulated", "link_gbps": 0.01, "link_latency_us": 2000.0}
DELAY_S = 0.004
QUICK = {"link": "emulated", "link_gbps": 0.5, "link_latency_us": 20.0}
KINDS: Mapping[str, Mapping[str, object]] = {
    "own link": {"link": "own"},
    "reference": {"link": "own"},
    "emulated link": {**SLOW, "predictor": "gate"},
    "placed": {**QUICK, **HOSTED},
    "drafts": {**QUICK, "drafts": "lookup"},
    "mixed formats": QUICK,
    "joined": {**HOSTED, "gpu_decode": "device"},
}
ELSEWHERE = "mixed formats", "joined"  # with a model, or a GPU, of their own


@contextmanager
def loaded(model: Path, tokens: int, arithmetic: str = "fast", **settings: Any) -> Iterator[Engine]:
    """Half of its experts are resident, and answers end at their limit only."""
    chosen = Settings({"budget": "50%", **settings})
    engine = Engine.load(LoadSpec.checked(str(model), chosen, context=tokens + 64, arithmetic=arithmetic))
    engine.prompt.ends = set()
    try:
        yield engine
    finally:
        engine.unload()


def answer(
    engine: Engine, tokens: int, draw: Any = None, taken: Callable[[], object] = lambda: None
) -> tuple[list[StepRecord], float]:
    steps, ends_s = list[StepRecord](), list[float]()
    for piece in engine.generate("the cat sat", Sampling(max_new_tokens=tokens, seed=1), draw=draw):
        if piece.kind == "token" and piece.step is not None and piece.step.phase == "decode":
            ends_s.append(time.perf_counter())
            steps.append(piece.step)
            taken()
    return steps[1:], (ends_s[-1] - ends_s[0]) * 1e3


@contextmanager
def of_kind(kind: str, model: Path, folder: Path) -> Iterator[Engine]:
    """An engine with half of its experts resident, whose tokens wait, are placed, guessed or led as KINDS says."""
    settings = KINDS[kind]
    if kind == "joined":
        with engine_on("cuda", model, 2) as engine:
            engine.change({"budget": "50%", **settings})
            engine.prompt.ends = set()
            yield engine
        return
    path = make_mixed(folder)[1] if kind == "mixed formats" else model
    with loaded(path, 62, "reference" if kind == "reference" else "fast", **settings) as engine:
        engine.parts.drafter.gate.fixed = 4
        yield engine


@pytest.mark.parametrize(
    ("kind", "answers"),
    layered(itertools.product(KINDS, (1, 17)), quick=lambda case: case[1] == 1 and case[0] not in ELSEWHERE),
)
def test_the_parts_sum_to_the_time_by_clock(model: Path, tmp_path: Path, kind: str, answers: int) -> None:
    meter, steps, wall_ms = dict[int, float](), list[StepRecord](), 0.0
    with of_kind(kind, model, tmp_path) as engine:
        for _ in range(answers):
            more, took_ms = answer(engine, 62)
            steps, wall_ms = steps + more, wall_ms + took_ms
            limit = engine.limit()
            meter.update(zip(limit.step.tolist(), limit.by_pass.sum(0).tolist(), strict=True))
    assert (len(steps) < 60 * answers) == any(step.drafted for step in steps) == (kind == "drafts")
    assert any(step.host_computed for step in steps) == ("host" in KINDS[kind].values())
    assert sum(meter[step.index] for step in steps) == pytest.approx(wall_ms, rel=0.03)
    columns = {name: np.array([float(getattr(one, name, 0.0)) for one in steps]) for name in COLUMNS}
    took_ms = float((columns["total_ms"] + columns["between_ms"]).sum())
    assert sum(part.sum() for part in claims(columns).values()) <= 1.03 * took_ms, "what is measured does not overlap"
    assert (columns["kernel_ms"] > 0).all() == (kind not in ("reference", "joined"))
    assert (columns["kernel_ms"] <= columns["compute_ms"]).all()


def test_a_slow_link_is_the_limit_and_counted_by_its_copies(model: Path) -> None:
    """Each copy takes what the emulated link is set to, which is far longer than computing."""
    with loaded(model, 40, **SLOW) as engine:
        steps, _ = answer(engine, 40, draw=wandering())
        misses = sum(one.requests - one.hits for one in steps)
        assert misses > len(steps), "there are copies to count"
        copies_ms = sum(one.copy_ms for one in steps) / len(steps)
        paced_ms = engine.transfers.pace.duration_s(engine.shape.expert_bytes) * 1e3
        assert copies_ms >= 0.999 * misses / len(steps) * paced_ms, "as many as were missed, none faster than the link"
        rate = misses / sum(one.requests for one in steps)
        least = engine.limit(Fewest(rate, len(steps), steps[-1].index))
        assert least.emulated and least.known and least.tokens == len(steps)
        assert least.limit_ms == pytest.approx(max(copies_ms, least.parts["computing"]), rel=1e-3)
        assert least.parts["regret"] == pytest.approx(0.0, abs=1e-6), "no policy would have missed less"
        half = engine.limit(Fewest(rate / 2, len(steps), steps[-1].index))
        assert half.limit_ms == pytest.approx(max(copies_ms / 2, half.parts["computing"]), rel=1e-3)
        waits_ms = sum(one.stall_ms for one in steps) / len(steps) - half.parts["copies"]
        assert half.parts["regret"] == pytest.approx(min(copies_ms / 2, waits_ms), rel=1e-3) and waits_ms > 0
        none = engine.limit()
        assert none.limit_ms == pytest.approx(none.parts["computing"]) and not none.known
        assert none.parts["link"] > 0 and none.parts["copies"] == none.parts["regret"] == 0


def wandering() -> Callable[[Sequence[int], torch.Tensor], int]:
    """Draws tokens at random, so that no cache is right for long."""
    rng = np.random.default_rng(1)
    return lambda ids, logits: int(rng.integers(3, logits.shape[-1]))


def means(engine: Engine, **how: Any) -> dict[str, float]:
    steps, _ = answer(engine, 20, **how)
    limit = engine.limit()
    rows = limit.by_pass[:, np.isin(limit.step, [one.index for one in steps])]
    return dict(zip(PARTS, rows.mean(1).tolist(), strict=True))


def test_what_is_slow_shows_in_its_own_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(ids: Sequence[int], logits: torch.Tensor) -> int:
        return int(logits.argmax())

    def slowly(ids: Sequence[int], logits: torch.Tensor) -> int:
        time.sleep(DELAY_S)
        return first(ids, logits)

    def slower(what: Any) -> Any:
        def run(*args: Any) -> Any:
            time.sleep(DELAY_S)
            return what(*args)

        return run

    with loaded(model, 200, link="own", predictor="gate") as engine:
        answer(engine, 20)
        assert means(engine, draw=slowly)["sampling"] >= DELAY_S * 1e3
        assert means(engine, draw=first, taken=lambda: time.sleep(DELAY_S))["delivery"] >= DELAY_S * 1e3
        controller = engine.wiring.controller
        with monkeypatch.context() as patch:
            patch.setattr(controller, "apply", slower(controller.apply))
            assert means(engine, draw=first)["dispatch"] >= DELAY_S * 1e3
        host = engine.predictor_host
        with monkeypatch.context() as patch:
            patch.setattr(host, "predict", slower(host.predict))
            assert means(engine, draw=first)["prefetch"] >= (engine.shape.layers - 1) * DELAY_S * 1e3


def test_what_the_host_computes_has_a_part(model: Path) -> None:
    """Threads of the host that take longer are waited for, and that is not computing."""
    with loaded(model, 200, link="own", miss_placement="host", host_threads=1) as engine:
        team = engine.parts.host.team
        if team is None:
            pytest.skip("one processor leaves no thread for the host")
        join = team.join

        def late() -> None:
            time.sleep(DELAY_S)
            join()

        team.join = late  # type: ignore[method-assign]
        steps, _ = answer(engine, 20, draw=wandering())
        waits = [one for one in steps if one.host_computed and one.join_ms]
        assert waits and all(one.join_ms >= DELAY_S * 1e3 for one in waits)
        limit = engine.limit()
        host = limit.by_pass[PARTS.index("host"), np.isin(limit.step, [one.index for one in waits])]
        assert host == pytest.approx([one.join_ms for one in waits], rel=1e-3)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kept_pace, "_of_process", {})
    kept_pace.keep_in(file := tmp_path / "not there yet" / "paces.json")
    yield file
    kept_pace.keep_in(None)


def gbps(**how: object) -> float:
    engine = Engine.load(LoadSpec.checked("demo", Settings({"predictor": "none"}), context=64, **how))
    try:
        return engine.transfers.pace.gbps
    finally:
        engine.unload()


def test_loads_have_the_link_of_the_first_until_its_file_is_gone(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 6.0, 8.0, *[5.0] * 3, *[36.0] * 3, *[36.0] * 3, *[18.0] * 3])
    monkeypatch.setattr(wiring, "time_pass", lambda *about: next(times))
    monkeypatch.setattr(wiring, "choose_threads", lambda *about, ours=False, own=False: (wiring.Threads(own=own), 1.0))
    first = gbps()
    assert gbps() == gbps() == first, "whatever these took"
    (row,) = kept_pace.kept_in(kept)
    assert row["model"] == "demo" and row["gbps"] == first and row["layer_ms"] == 1.0, "the least of six layers"
    kept.unlink()
    assert gbps() == pytest.approx(first / 6, rel=0.1), "measured anew"
    assert gbps() == pytest.approx(first / 3, rel=0.1), "the machine was busy"


def kept_ms(arithmetic: str, measured: float, **how: object) -> float:
    return kept_pace.layer_ms(plan(LoadSpec.checked("demo", **how)), "hash", arithmetic, lambda: measured)


def test_without_a_file_it_is_kept_for_the_process_by_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pace, "_of_process", {})
    assert kept_ms("fast", 1) == kept_ms("fast", 2) == 1 and kept_ms("reference", 4) == 4
    assert kept_ms("fast", 7, format="int8") == 7


@pytest.mark.parametrize("damage", ['{"layer_ms": -1}', '{"layer_ms": "2"}', '{"layer_ms": NaN}', "[]", "3"])
def test_a_damaged_row_is_measured_anew(kept: Path, damage: str) -> None:
    kept_ms("fast", 1.0)
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps(dict.fromkeys(content, json.loads(damage))))
    assert kept_pace.kept_in(kept) == [] and kept_ms("fast", 2.0) == 2.0
    assert [row["layer_ms"] for row in kept_pace.kept_in(kept)] == [2.0]
