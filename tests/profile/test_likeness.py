"""Which inputs experts are compared on, and with how little at a time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from core.engine import Engine
from core.measure.calibrate import likeness
from core.measure.calibrate.gather import calibrate
from core.measure.calibrate.texts import tokenize
from core.memory.store import Cancelled
from core.profile.summary import best_pairs
from tests.profile.conftest import MakeEngine

TEXTS = ["Nothing is fetched that is there already.", "Bread, pane, pain, Brot."]


def measured(engine: Engine, texts: list[str]) -> np.ndarray:
    found = calibrate(engine, texts, parts={"likeness"}).likeness
    assert found is not None
    return found


def test_a_sample_of_what_was_read_is_enough(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(engine, TEXTS)
    monkeypatch.setattr(likeness, "TOKENS", 16)
    some = measured(engine, TEXTS)
    assert np.array_equal(some, measured(engine, TEXTS)) and not np.array_equal(some, whole)  # the same 16 again
    assert np.abs(some.astype(float) - whole).max() < 0.3


def test_it_does_not_depend_on_how_many_fit_at_once(engine: Engine) -> None:
    """68 pairs a pass: one expert after another for 65 tokens; and then all at once."""
    with engine.workbench("test") as bench:
        kept = likeness.Likeness(bench.shape.layers, bench.shape.experts, bench.shape.hidden)
        with bench.watched(kept.add, lambda embedded: None):
            for text in TEXTS:
                ids = tokenize(engine.prompt.tokenizer, text).ids.tolist()
                kept.begin(len(ids))
                bench.run(ids, bench.kv.fresh())
        found = []
        for bench.chunk in (17, 512):
            found.append(kept.measure(bench, lambda text, share: None, threading.Event()))
    assert found[0] is not None and found[1] is not None
    np.testing.assert_allclose(found[0], found[1], atol=1e-3)
    np.testing.assert_allclose(found[1], measured(engine, TEXTS), atol=1e-3)


def test_one_token_is_enough_and_none_is_not(engine: Engine) -> None:
    one = measured(engine, ["a"])
    assert one[:, range(8), range(8)].min() == 1 and np.isfinite(one).all()
    np.testing.assert_array_equal(one, one.transpose(0, 2, 1))
    with engine.workbench("test") as bench:
        kept = likeness.Likeness(3, 8, 64)
        assert kept.measure(bench, lambda text, share: None, threading.Event()) is None


def test_it_can_be_cancelled(engine: Engine) -> None:
    cancel = threading.Event()

    def progress(text: str, share: float) -> None:
        if text.startswith("Measuring how alike"):
            cancel.set()

    with pytest.raises(Cancelled):
        calibrate(engine, TEXTS, parts={"likeness"}, progress=progress, cancel=cancel)


def test_experts_in_a_shared_pool_with_few_slots(make_engine: MakeEngine, engine: Engine) -> None:
    small = make_engine(settings={"scope": "global", "budget": "17%"})
    np.testing.assert_allclose(measured(small, TEXTS), measured(engine, TEXTS), atol=1e-3)


def test_the_most_alike_pair_of_each_layer(engine: Engine) -> None:
    profile = calibrate(engine, TEXTS, parts={"likeness"})
    assert profile.likeness is not None
    expected = [max(float(row[i, j]) for i in range(8) for j in range(i)) for row in profile.likeness]
    assert best_pairs(profile).tolist() == expected
