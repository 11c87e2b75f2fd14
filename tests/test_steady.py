"""What an engine leaves alone while it lives, and gives back when it is gone."""

from __future__ import annotations

import gc
import weakref

import pytest

from core import steady


class Knot:
    """Holds on to itself."""

    def __init__(self) -> None:
        self.own = self


def test_freed_memory_is_given_back_at_most_twice_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [1000.0], list[float]()
    monkeypatch.setattr(steady.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(steady, "trim", lambda: trimmed.append(now[0]))
    monkeypatch.setattr(steady, "_trimmed_s", 0.0)
    for _ in range(100):
        steady.trim_now_and_then()
        now[0] += 1.0
    assert trimmed == [1000.0, 1031.0, 1062.0, 1093.0]


def test_what_exists_with_an_engine_is_not_looked_at_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "gc", gc)  # the real one
    gc.unfreeze()
    lost, held = weakref.ref(Knot()), Knot()
    steady.settle()
    assert lost() is None and gc.get_freeze_count() > 0
    seen = weakref.ref(held)
    del held
    gc.collect()
    assert seen() is not None  # frozen
    steady.unsettle()
    assert seen() is None and gc.get_freeze_count() == 0
