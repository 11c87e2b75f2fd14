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
