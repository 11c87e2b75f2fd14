"""Settings changed over and over in the middle of answers: nothing of what acted before stays behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import psutil
import pytest

from core.engine import Engine
from core.settings.registry import variants
from core.settings.sampling import Sampling
from tests.selection import layered

RECORDS = {"LazyStepRecord", "Transfer", "StepRecord", "Ticket", "Lossy"}  # bounded, see test_telemetry.py
VALUES = {
    "predictor": [v.name for v in variants("predictor") if not v.needs],
    "eviction": [v.name for v in variants("eviction") if not v.needs],
    "scope": ["global", "layer"],
    "budget": ["75%", "50%"],
    "link": ["emulated", "own"],
    "miss": ["drop", "wait"],
}


def through(engine: Engine, name: str) -> None:
    """Every value of a setting for one token, and back to the first."""
    values = [*VALUES[name], VALUES[name][0]]
    answer = engine.generate("Hello", Sampling(temperature=0, max_new_tokens=len(values) + 1))
    for piece in answer:
        if piece.kind == "token" and values:
            engine.change({name: values.pop()})
    assert not values, "the answer ended before"


def alive(engine: Engine) -> dict[str, int]:
    """What there is of our own objects, of hooks in the model, threads, child processes and open files."""
    gc.collect()
    ours = Counter(type(one).__qualname__ for one in gc.get_objects() if type(one).__module__.startswith("core."))
    process = psutil.Process()
    return {
        **{name: count for name, count in ours.items() if name not in RECORDS},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules()),
        "threads": threading.active_count(),
        "processes": len(process.children()),
        "files": process.num_fds() if hasattr(process, "num_fds") else 0,
    }


@pytest.mark.parametrize("name", layered(VALUES, quick=lambda name: name in ("predictor", "miss")))
def test_changing_a_setting_leaves_nothing_behind(engine: Engine, name: str) -> None:
    engine.change({"quality_rate": 0.0})  # or what lossy answers are to be compared by would wait for its turn
    through(engine, name)
    before = alive(engine)
    for _ in range(3):
        through(engine, name)
    after = alive(engine)
    assert {key: (before.get(key), count) for key, count in after.items() if count > before.get(key, 0)} == {}
