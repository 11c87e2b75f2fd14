"""The statistics of a soak, its random values, what it makes of what it saw, and all of it for a few seconds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak.figures import Slope, after_warm_up, at_share, quantiles, slope, thinned, together
from bench.soak.result import Seen, course, result, table
from bench.soak.score import Score
from bench.soak.server import ProcessUse, ResourceUse
from bench.soak.values import value
from core.settings.config import Settings, params
from core.types import ModelShape

SHAPE = ModelShape(layers=6, experts=32, top_k=4, hidden=64, expert_bytes=1000)
ROOT = Path(__file__).resolve().parents[2]


def test_a_line_has_its_slope_and_no_error() -> None:
    found = slope([0, 30, 60, 90, 120], [5, 6, 7, 8, 9])
    assert found is not None
    assert found.per_minute == pytest.approx(2.0)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.is_growth


def test_one_peak_does_not_bend_a_slope() -> None:
    values = [10.0] * 41
    values[20] = 500.0
    found = slope(range(0, 41 * 5, 5), values)
    assert found is not None
    assert found.per_minute == 0.0
    assert not found.is_growth


def test_noise_is_no_growth_and_growth_within_noise_is_found() -> None:
    calls, kept = 0, 0
    for seed in range(40):
        dice = random.Random(seed)
        noise = [dice.gauss(0, 1) for _ in range(60)]
        at = [15.0 * i for i in range(60)]
        flat, grown = slope(at, noise), slope(at, [n + 0.5 * t / 60 for n, t in zip(noise, at, strict=True)])
        assert flat is not None and grown is not None
        calls += flat.is_growth
        kept += grown.is_growth
        assert grown.per_minute == pytest.approx(0.5, abs=5 * grown.error)
    assert calls <= 4, "about one in forty by chance"
    assert kept == 40


def test_what_follows_itself_has_a_wider_error() -> None:
    dice, walk, level = random.Random(3), [], 0.0
    for _ in range(200):
        level = 0.9 * level + dice.gauss(0, 1)
        walk.append(level)
    mixed = dice.sample(walk, len(walk))
    at = [5.0 * i for i in range(200)]
    following, independent = slope(at, walk), slope(at, mixed)
    assert following is not None and independent is not None
    assert following.error > 2.5 * independent.error


def test_steps_between_what_is_not_alike_are_no_growth() -> None:
    dice, at = random.Random(4), [5.0 * i for i in range(200)]
    alike = [(i // 60) % 4 for i in range(200)]  # mostly upwards
    steps = [30.0 * of + dice.gauss(0, 1) for of in alike]
    mixed, apart = slope(at, steps), slope(at, steps, alike)
    assert mixed is not None and mixed.is_growth
    assert apart is not None and abs(apart.per_minute) < 3 * apart.error and apart.error < mixed.error / 2
    grown = slope(at, [step + t / 60 for step, t in zip(steps, at, strict=True)], alike)
    assert grown is not None and grown.is_growth and grown.per_minute == pytest.approx(1.0, abs=0.1)
    assert slope(at[:5], steps[:5], range(5)) is None, "nothing to compare"


def test_several_slopes_are_weighted_by_their_certainty() -> None:
    whole = together([Slope(1.0, 0.1), Slope(1.0, 0.1), Slope(9.0, 10.0)])
    assert whole is not None and whole.per_minute == pytest.approx(1.0, abs=0.01)
    assert whole.error == pytest.approx(0.1 / 2**0.5, rel=0.01)
    assert together([]) is None


def test_too_few_points_have_no_slope() -> None:
    assert slope([0, 1, 2], [1, 2, 3]) is None
    assert slope([], []) is None
    alike = [i // 7 % 2 for i in range(1000)]
    points = thinned(range(1000), range(1000), alike)
    assert 50 < len(points) <= 240 and all(alike[round(60 * minute)] == kind for minute, _, kind in points)


def test_the_first_third_is_warm_up() -> None:
    assert after_warm_up([10, 20, 30, 40]) == 1
    assert after_warm_up([]) == 0


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "max": 100}
    assert quantiles([7.0]) == {"p50": 7.0, "p95": 7.0, "max": 7.0}
    assert quantiles([]) == {}
    assert at_share([1, 2, 3], 0.95) == 3


def test_random_values_are_valid_and_every_knob_moves() -> None:
    dice = random.Random(5)
    for name, param in params().items():
        drawn = {value(param, SHAPE, dice) for _ in range(40)}
        for one in drawn:
            Settings({name: one})
        assert len(drawn) > 1, f"{name} never moves"


CHILDREN = ((7,), (7, 8))  # process ids: one that a setting starts and ends beside one that stays


def seen_for(minutes: int, growth_mb: float, child_growth_mb: float = 0.0) -> Seen:
    seen = Seen(
        minutes,
        1,
        10,
        took_ms={"/healthz": [1.0] * 99 + [80.0], "/live/frame": [60.0] * 100},
        recorded=(2000, 5_000_000),
    )
    dice = random.Random(1)
    for at in range(0, minutes * 60, 5):
        size = int(3e8 + 1e6 * (growth_mb * at / 60 + dice.gauss(0, 2)))
        children = {
            of: ProcessUse(4 * 10**7 + round(1e6 * child_growth_mb * at / 60), 10**8, 11, 2)
            for of in CHILDREN[at // 60 % 2]
        }
        threads, handles = 40 + dice.randrange(2), 60 + 3 * len(children)
        use = ProcessUse(size, size + 10**8, handles, threads)
        seen.held.append(ResourceUse(at, "demo", use, children, at * 1000))
        if at % 60 == 0:
            seen.unloaded.append(ResourceUse(at, "", use, {}, at * 1000))
    return seen


def test_goals_are_kept_and_missed() -> None:
    score = Score()
    score.did("asked")
    score.refused("load")
    found = result(seen_for(12, 0.0), score, ["something harmless"], finished=True)
    assert found["goals"] == {
        "memory without a model does not grow": True,
        "handles do not grow": True,
        "threads do not grow": True,
        "memory of child processes does not grow": True,
        "no error": True,
        "p95 of /healthz under 50 ms": True,
        "p95 of /live/frame under 50 ms": False,
    }
    assert found["database_bytes_per_1000_tokens"] == 2_500_000
    assert (found["done"], found["refused"], found["errors"]) == ({"asked": 1}, {"load": 1}, 0)
    assert "MISSED: p95 of /live/frame" in table(found)
    assert json.loads(json.dumps(found)) == found
    grown = result(seen_for(12, 2.0), score, [], finished=True)
    assert grown["goals"]["memory without a model does not grow"] is False
    assert grown["slopes"]["unloaded_mb"]["per_minute"] == pytest.approx(2.0, abs=0.5)
    assert grown["slopes"]["own_mb"]["per_minute"] == pytest.approx(2.0, abs=0.5)
    assert grown["goals"]["memory of child processes does not grow"] is True
    grown = result(seen_for(12, 0.0, 1.5), score, [], finished=True)
    assert grown["goals"]["memory of child processes does not grow"] is False
    assert grown["goals"]["memory without a model does not grow"] is True
    assert grown["slopes"]["child_own_mb"]["per_minute"] == pytest.approx(1.5, abs=0.1)


def test_errors_of_clients_and_of_the_log_are_counted() -> None:
    score = Score()
    score.error("/live/state: 500")
    found = result(seen_for(1, 0.0), score, ["Traceback (most recent call last):", "  File"], finished=False)
    assert found["errors"] == 2
    assert found["goals"]["no error"] is False
    assert "/live/state: 500" in table(found)
    assert [one["minute"] for one in course(seen_for(3, 0.0).held)] == [0, 1, 2]


def test_nothing_seen_is_still_a_result() -> None:
    found = result(Seen(60, 1, 10), Score(), [], finished=False)
    assert found["goals"]["memory without a model does not grow"] is None
    assert "too short to tell" in table(found)


@pytest.mark.long(0.5)
def test_a_few_seconds_of_the_real_thing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "launch.py", "bench", "soak", "--small", "--json", "--save", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["finished"] and not found["stopped"]
    assert found["errors"] == 0, (found["first_errors"], found["last_logged"])
    assert found["tokens"] > 0 and found["unloaded"]
    assert {"asked", "setting", "page opened"} <= set(found["done"])
    assert set(found["took_ms"]) == {"/healthz", "/live/frame"}
