"""bench methods: the papers' orderings by hand, and the whole of it on the demo model with a drawn profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench import methods
from core.settings.registry import variants
from core.simulate import BELADY
from core.simulate.prefetchers import ORACLE
from tests.engine.profiles import drawn_profile


def figures(hit: float, recall: float) -> dict[str, float]:
    return {"hit_rate": hit, "recall_at_k": recall}


def test_an_ordering_holds_everywhere_in_part_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        methods,
        "ORDERINGS",
        {
            "always": ("policy", "lcp", "lru"),
            "sometimes": ("hit", "gate", "request"),
            "never": ("recall", "gate", "request"),
            "a tie is no more": ("heed", "plec", "lru"),
        },
    )
    found = {
        "hit_rate": {"layer": {"25%": {"lcp": 0.5, "lru": 0.4}, "50%": {"lcp": 0.8, "lru": 0.7}}},
        "prefetchers": {
            "25%": {"gate": figures(0.3, 0.2), "request": figures(0.2, 0.4)},
            "50%": {"gate": figures(0.6, 0.2), "request": figures(0.7, 0.4)},
        },
        "behind": {"25%": {"plec": figures(0.5, 0.1), "lru": figures(0.5, 0.1)}},
    }
    said = {one["claim"]: one["holds"] for one in methods.orderings(found)}
    assert said == {"always": "yes", "sometimes": "in part", "never": "no", "a tie is no more": "no"}


@pytest.mark.long(0.2)
def test_all_of_it_on_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(engine: Any, texts: Sequence[Any], limit: int) -> Any:
        return replace(drawn_profile(engine), times={"att": 0.5, "moe": 0.3, "head": 1.0, "load": 0.7})

    wanted = ("gate", "expert_map", "request", "transitions", "recent", "hybrid", "default_vectors", "routing_path")
    some = {n: s for n, s in methods.subjects().items() if n.startswith(wanted)}
    monkeypatch.setattr(methods, "calibrate", drawn)
    monkeypatch.setattr(methods, "subjects", lambda: some)
    result: Any = json.loads(json.dumps(methods.run(small=True, say=lambda text: None)))
    for sizes in result["hit_rate"].values():
        for row in sizes.values():
            assert row.keys() == {BELADY, *(v.name for v in variants("eviction"))}
            assert row["none"] == 0.0 and all(row[BELADY] >= rate for rate in row.values())
    for row in result["prefetchers"].values():
        assert row.keys() == {"none", ORACLE, *some}
        assert row[ORACLE]["tpot_ms"] <= min(one["tpot_ms"] for one in row.values())
        assert row["none"]["prefetch_mb"] == 0.0 < row["gate"]["prefetch_mb"]
    assert {one["holds"] for one in result["orderings"]} <= {"yes", "in part", "no"}
    assert "simulated" in result["simulated"] and "Belady" not in methods.table(result)[:10]
