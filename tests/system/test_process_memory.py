"""What an engine leaves alone while it lives, and gives back when it is gone."""

from __future__ import annotations

import gc
import weakref

import pytest

from core.system import process_memory


class Knot:
    """Holds on to itself."""

    def __init__(self) -> None:
        self.own = self


def test_freed_memory_is_given_back_at_most_twice_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [1000.0], list[float]()
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_memory, "trim", lambda: trimmed.append(now[0]))
    monkeypatch.setattr(process_memory, "_trimmed_s", 0.0)
    for _ in range(100):
        process_memory.trim_now_and_then()
        now[0] += 1.0
    assert trimmed == [1000.0, 1031.0, 1062.0, 1093.0]


def test_what_exists_with_an_engine_is_not_looked_at_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "gc", gc)  # the real one
    gc.unfreeze()
    lost, held = weakref.ref(Knot()), Knot()
    process_memory.settle()
    assert lost() is None and gc.get_freeze_count() > 0
    seen = weakref.ref(held)
    del held
    gc.collect()
    assert seen() is not None  # frozen
    process_memory.unsettle()
    assert seen() is None and gc.get_freeze_count() == 0
