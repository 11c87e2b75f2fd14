"""Pins, slots per layer and a profile's counts in a configuration: alone or together, with and without a clock."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import Engine
from core.errors import SettingError
from core.profile import Profile
from core.profile.trace import ArrayTrace, FileTrace
from core.settings.config import Settings
from core.simulate import BELADY, Clock, Config, simulate
from core.simulate import run as run_module
from core.simulate.prefetchers import TimedConfig, follow, predictor_for, timed
from core.types import StepRecord
from tests.profiles import profile_of
from tests.simulate.test_engine import QUESTIONS, recorded, restart

LAYERS, EXPERTS, K, SLOTS = 3, 16, 2, 24


@pytest.fixture
def trace() -> ArrayTrace:
    random = np.random.default_rng(0)
    liked = random.permuted(np.arange(EXPERTS))[None] * np.array([[2.0], [0.4], [0.0]])
    return ArrayTrace(np.argsort(-(liked + random.gumbel(size=(400, LAYERS, EXPERTS))), 2)[..., :K], EXPERTS)


def profile(trace: ArrayTrace) -> Profile:
    (chunk,) = trace.chunks()
    counts = np.stack([np.bincount(chunk.ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])
    return profile_of(LAYERS, EXPERTS, K, counts=counts, gate_recall=np.array([np.nan, 0.4, 0.9], np.float32))


def config(trace: ArrayTrace, **settings: object) -> Config:
    return Config.of(Settings(settings), SLOTS, LAYERS, EXPERTS, K, profile(trace))


def test_a_division_by_use_misses_less_than_an_even_one_where_layers_differ(trace: ArrayTrace) -> None:
    even, by_use, best = simulate(
        trace,
        [
            config(trace, eviction="static"),
            config(trace, eviction="static", layer_slots="profile"),
            replace(config(trace, layer_slots="profile"), policy=BELADY, params={}),
        ],
    )
    assert even.config.sizes == (8, 8, 8) and by_use.config.sizes[0] < 8 < by_use.config.sizes[2]
    assert sum(by_use.config.sizes) == SLOTS
    assert (best.hit_rate or 0) > (by_use.hit_rate or 0) > (even.hit_rate or 0) + 0.01


def test_pinned_experts_always_hit(trace: ArrayTrace) -> None:
    (chunk,) = trace.chunks()
    pins = "1:3, 1:4, 2:0"
    for name in ("none", "lru", "random"):
        (result,) = simulate(trace, [config(trace, eviction=name, pins=pins)])
        asked = np.isin(chunk.ids[:, 1], (3, 4)).sum(), (chunk.ids[:, 2] == 0).sum()
        hits = [round((rate or 0) * 400 * K) for rate in result.layer_hit_rate]
        if name == "none":
            assert hits == [0, *asked]  # and nothing else stays
        else:
            assert hits[1] >= asked[0] and hits[2] >= asked[1]


def test_what_cannot_be_is_said_as_the_engine_says_it(trace: ArrayTrace) -> None:
    with pytest.raises(SettingError, match="Layer 0 has 8 slots, of which 7 pinned experts leave 1"):
        config(trace, pins=" ".join(f"0:{e}" for e in range(7)))
    with pytest.raises(SettingError, match="needs a profile"):
        Config.of(Settings({"layer_slots": "profile"}), SLOTS, LAYERS, EXPERTS, K)
    with pytest.raises(SettingError, match="Layer 0 has 8 slots"):
        simulate(trace, [Config("lru", SLOTS, pinned=tuple(range(7)))])


@pytest.mark.long(0.1)
def test_processes_and_neighbours_change_nothing(trace: ArrayTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"layer_slots": "profile"},
        {"layer_slots": "adapmoe"},
        {"pins": "0:1, top:1"},
        {"eviction": "static"},
        {"pins": "0:1, top:1", "layer_slots": "adapmoe"},
    ]
    configs = [config(trace, **one) for one in asked]
    alone = [simulate(trace, [one], processes=1)[0] for one in configs]
    assert simulate(trace, configs, processes=1) == alone
    monkeypatch.setattr(run_module, "SMALL", 0)
    assert simulate(trace, configs, processes=2) == alone


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    "asked",
    [
        {"layer_slots": "adapmoe", "eviction": "lfu"},
        {"pins": "0:1, 2:5, top:1"},
        {"pins": "top:2", "scope": "global"},
        {"eviction": "static"},
    ],
    ids=lambda asked: "-".join(asked.values()),
)
def test_the_timed_simulator_hits_alike(trace: ArrayTrace, asked: dict[str, Any], tmp_path: Path) -> None:
    one = config(trace, **asked)
    (plain,) = simulate(trace, [one])
    (clocked,) = timed(trace, [TimedConfig(one)], Clock(compute_ms=5.0, load_ms=0.5, expert_ms=0.1), 1000, processes=1)
    assert clocked.hit_rate == pytest.approx(plain.hit_rate)


TRIES = 6  # on a machine that is busy with other things
COPY_MS = 20.0  # several times what the demo model computes in a layer, even there
GENERATED = 10


def measured(engine: Engine, path: Path) -> list[StepRecord]:
    """An answer whose routing, and what the predictor named, is recorded; its decoded tokens."""
    slow = engine.settings["link"]
    engine.change({"link": "own"})
    restart(engine)
    engine.change({"link": slow})
    engine.predictor_host.use(*engine.settings.prefetch.predictor, None)
    engine.parts.recorder.forget()
    engine.keep(probs=False, ranks=True, tokens=False)
    steps = recorded(engine, path, QUESTIONS[:1], GENERATED)
    engine.keep(probs=False, ranks=False, tokens=False)
    return [step for step in steps if step.phase == "decode"]


def predicted(engine: Engine, path: Path, steps: list[StepRecord]) -> float:
    """Of the same trace; the times of computing are those that the engine measured."""
    trace, settings = FileTrace(path), engine.settings
    one = TimedConfig(Config(str(settings["eviction"]), engine.expert_cache.slots), *settings.prefetch.predictor)
    layers, k = trace.layers, trace.top_k
    compute_ms = statistics.fmean(step.compute_ms - step.predict_ms for step in steps)
    idle_ms = statistics.fmean(step.idle_ms for step in steps)
    clock = Clock(
        compute_ms + idle_ms,
        COPY_MS,
        expert_ms=compute_ms / layers / k / 2,
        head_ms=idle_ms,
        predict_ms=statistics.fmean(step.predict_ms for step in steps) / layers,
    )
    course = follow(trace, one, clock, engine.sizes.blob, predictor_for(one, trace), start="filled")
    sums = course.run()["decode"]
    return (sums.compute_s + sums.stall_s) * 1e3 / sums.tokens


@pytest.mark.long(0.1)  # it measures times
@pytest.mark.parametrize("predictor", ["none", "gate", "all_next"])
def test_predicted_speed_is_within_a_tenth_of_the_measured(demo: Engine, predictor: str, tmp_path: Path) -> None:
    """Half of all experts resident; a token's copies take ten times its computing, so noise in that hardly counts. A
    try in which another program took the machine for a while is repeated."""
    gbps = demo.sizes.blob / (COPY_MS * 1e-3) / 1e9
    demo.change(
        {
            **Settings({"budget": "50%", "link": "emulated", "link_gbps": gbps, "link_latency_us": 0.0}),
            "predictor": predictor,
        }
    )
    ratios = []
    for attempt in range(TRIES):
        steps = measured(demo, tmp_path / f"{attempt}")
        tpot_ms = statistics.fmean(step.total_ms for step in steps)
        ratios.append(predicted(demo, tmp_path / f"{attempt}", steps) / tpot_ms)
        if 0.9 < ratios[-1] < 1.1:
            break
    demo.change({"link": "own"})
    assert 0.9 < ratios[-1] < 1.1, ratios
    assert statistics.fmean(step.stall_ms for step in steps) > 0.5 * tpot_ms  # it was the link that decided
