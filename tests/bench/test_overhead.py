"""bench overhead: its arithmetic by hand, and the whole of it on the demo model with a drawn profile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import overhead
from tests.engine.profiles import drawn_profile


def figures(total_ms: float, predict_ms: float, stall_ms: float = 0.0) -> dict[str, float]:
    return {
        "total_ms": total_ms,
        "compute_ms": total_ms - stall_ms,
        "stall_ms": stall_ms,
        "predict_ms": predict_ms,
        "record_ms": 0.0,
    }


def test_what_a_predictor_adds_is_compared_pair_by_pair_by_hand() -> None:
    """The machine grows slower; in each pair the predictor adds 1 ms, half of which the engine counted as its own."""
    with_it = [figures(11.0, 0.5), figures(21.0, 0.5), figures(41.0, 0.5)]
    told = overhead.judged(with_it, [figures(10.0, 0.0), figures(20.0, 0.0), figures(40.0, 0.0)])
    assert (told["total_ms"], told["none_ms"], told["added_ms"], told["predict_ms"]) == (21.0, 20.0, 1.0, 0.5)
    assert told["beyond"] == pytest.approx(0.5 / 20.0)  # of 5 %, 2.5 % and 1.25 % the middle one
    assert told["kept"] and not told["blocks"]


def test_more_than_its_own_time_and_waiting_are_told() -> None:
    told = overhead.judged([figures(11.0, 0.25, stall_ms=0.125)], [figures(10.0, 0.0)])
    assert told["beyond"] == pytest.approx(0.075)
    assert not told["kept"] and told["blocks"]


@pytest.mark.long(0.2)
def test_all_of_it_on_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "calibrate", lambda engine, texts, limit: drawn_profile(engine))
    asked = {name: changes for name, changes in overhead.subjects().items() if name in ("gate", "record_lab")}
    monkeypatch.setattr(overhead, "subjects", lambda: asked)
    result: Any = json.loads(json.dumps(overhead.run(small=True, say=lambda text: None)))
    assert result["predictors"].keys() == {"gate", "record_lab"}
    for name, figure in (("gate", "predict_ms"), ("record_lab", "record_ms")):
        one = result["predictors"][name]
        assert one["total_ms"] > one["compute_ms"] > one[figure] > 0 and one["stall_ms"] == 0
    text = overhead.table(result)
    assert "none blocks the compute path" in text and "record_lab" in text
