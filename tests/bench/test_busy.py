"""bench busy: what it compares, and all of it on the demo model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import busy
from core.native.contention import watch


def test_ratios_are_of_the_same_round() -> None:
    def of(*values: float) -> dict[str, list[float]]:
        return {name: list(values) for name in busy.FIGURES}

    seen = {"idle without": of(1, 2, 4), "idle": of(1, 2, 4), "beside without": of(9, 9, 9), "beside": of(2, 4, 8)}
    found = busy._ratios(seen)
    assert found["beside over idle"] == {"ttft_ms": 2, "tpot_ms": 2}
    assert found["beside without over idle without"]["tpot_ms"] == 4.5
    assert found["idle over idle without"]["ttft_ms"] == 1


def test_nobody_looks_inside_and_somebody_afterwards() -> None:
    watch.computing()
    with busy._unwatched():
        watch.computing()
        assert not watch.looks and not watch.contended
    watch.computing()
    assert watch.looks


@pytest.mark.long(0.5)
def test_all_of_it_on_the_demo_model() -> None:
    found: Any = json.loads(json.dumps(busy.run(small=True, say=lambda text: None)))
    for kind in busy.KINDS:
        assert found[kind]["ttft_ms"]["median"] > 0 < found[kind]["tpot_ms"]["median"]
    assert found["loops"] >= 1 and "endless loops" in busy.table(found)
