"""bench split: the smoke run, and what is read off its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.papers.moepic import coarser, inner_optimum, without_configurator
from bench.papers.parts import HOLDS, NO, PART
from bench.split import LINKS, LOADS, PLAIN, PLANNED, SHARES, judged, run, table
from core.policy.allocation.cache_plan import CachePlan


def rows(times: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {name: {"tpot_ms": ms} for name, ms in times.items()}


def test_what_pays_is_judged_beside_the_best_plain_cache() -> None:
    times = {"lru": 9.0, "lru_gate": 6.0, "lcp_gate": 8.0, "theta 0.00": 20.0, "theta 0.50": 4.0, "theta 1.00": 7.0}
    plan = CachePlan((4.0,), (8,), (0.5,), (1.0,), 4.0)
    found = judged(rows({**times, "moepic_split": 3.0}), {"moepic_split": plan, "theta 0.25": plan})
    assert found["best_plain"] == "lru_gate" and found["gain"] == 2.0 and found["gain_of_best_theta"] == 1.5
    assert found["best_theta"] == 0.5 and found["inner_optimum"] is True
    assert found["predicted_over_measured"] == {"moepic_split": pytest.approx(5 / 3)}
    nothing = judged({name: {"problem": "no room"} for name in times}, {})
    assert nothing["gain"] is None and nothing["best_theta"] is None and nothing["predicted_over_measured"] == {}


def link(best: str, full: float, zeta: float) -> dict[str, Any]:
    times = {"lru": 5.0, "theta 0.00": 9.0, "theta 0.50": 6.0, "theta 1.00": 7.0, "moepic_split": full}
    return {"rows": rows({**times, best: 3.0}), "best_plain": "lru", "zeta": {"0.01": 4.0, "0.1": zeta}}


def test_the_papers_claims_are_read_off_it() -> None:
    good, bad = link("theta 0.50", 2.5, 4.5), link("theta 1.00", 8.0, 3.5)
    for links, wanted in (({"a": good}, HOLDS), ({"a": bad}, NO), ({"a": good, "b": bad}, PART)):
        result = {"links": links, "budget": "20%"}
        for read in (inner_optimum, without_configurator, coarser):
            said = read(result)
            assert said is not None and said[0] == wanted and "ms" in said[1]


@pytest.mark.long(1)
def test_it_runs(tmp_path: Path) -> None:
    found = run(tmp_path, small=True, say=lambda text: None)
    assert json.loads(json.dumps(found)) == found
    assert found["links"].keys() == {*LINKS, "disk"} and found["blocks"] == 3
    for name, one in found["links"].items():
        assert one["rows"].keys() == {*PLAIN, *PLANNED, *(f"theta {n / 3:.2f}" for n in range(4))}
        assert all(not row["problem"] for row in one["rows"].values())
        assert one["emulated"] == (name != "disk") and one["gain"] > 0
        assert one["rows"]["theta 0.33"]["top_hits"] > 0 == one["rows"]["lru"]["top_hits"]
        assert one["predicted_over_measured"].keys() == {"moepic_split", *(f"theta {n / 3:.2f}" for n in range(4))}
    assert len(found["expected"]) == len(LOADS) * len(SHARES)
    resident = [one for one in found["expected"] if one["load"] == min(LOADS) and one["share"] == max(SHARES)]
    assert all(one["whole_ms"] == pytest.approx(one["plan_ms"], rel=0.05) for one in resident), "nothing to save"
    assert "times as fast" in table(found) and "not measured" in table(found)
