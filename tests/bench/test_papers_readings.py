"""papers: verdicts that a row computes from a result, each by hand."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from bench.papers import finemoe, moepic, sources, speculating
from bench.papers.over_budgets import correlation, hits_save_time, least, least_memory
from bench.papers.parts import HOLDS, NO, OPEN, PART, Answer
from tests.bench.drawn import Drawn


def over_budgets(**systems: list[tuple[float, float]]) -> dict[str, Any]:
    """A result of `bench systems`: of each system (hit rate, ms a token) at 100, 200, ... MB."""
    budgets = [str(at) for at in range(max(map(len, systems.values())))]
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "model": "demo",
        "budgets": {at: {"bytes": (int(at) + 1) * 100_000_000} for at in budgets},
        "systems": {
            name: {
                at: {"hit_rate": hits, "tpot_ms": ms, "exact": name != "lossy", "problem": ""}
                for at, (hits, ms) in zip(budgets, rows, strict=True)
            }
            for name, rows in systems.items()
        },
    }


def test_time_falls_with_hits_where_their_ranks_are_opposite() -> None:
    assert correlation([(1, 3), (2, 2), (4, 1)]) == -1 and correlation([(1, 1), (1, 2)]) is None
    assert correlation([(1, 1), (2, 3), (3, 2)]) == pytest.approx(0.5)
    falls, mixed = [(0.2, 9.0), (0.5, 6.0), (0.8, 5.0)], [(0.2, 9.0), (0.5, 9.5), (0.8, 5.0)]
    rises, flat = [(0.2, 5.0), (0.5, 6.0), (0.8, 9.0)], [(0.0, 9.0), (0.0, 6.0), (0.0, 5.0)]
    source = sources.SystemsReading(hits_save_time)

    def said(**systems: list[tuple[float, float]]) -> Answer:
        return source.answer(Drawn(systems=[over_budgets(**systems)]))

    found = said(a=falls, lossy=rises, b=flat)
    assert found.verdict == HOLDS and "20.0% 9.00 ms, 50.0% 6.00 ms, 80.0% 5.00 ms (r -1.00)" in found.text
    assert "1 of 1 exact systems" in found.text and "lossy" not in found.text
    assert said(a=falls, b=rises).verdict == said(a=mixed).verdict == PART and said(a=rises).verdict == NO
    assert said(b=flat).verdict == OPEN
    disturbed = {**over_budgets(a=falls), "others_cores": 1.0}
    assert source.answer(Drawn(systems=[disturbed])).verdict == OPEN
    both = [over_budgets(a=falls), {**over_budgets(a=rises), "model": "other"}]
    assert source.answer(Drawn(systems=both)).verdict == PART


def test_the_least_memory_is_interpolated_and_not_beyond_what_was_measured() -> None:
    curve = [(100.0, 10.0), (200.0, 6.0), (300.0, 4.0)]
    assert [least(curve, ms) for ms in (11, 8, 6, 5, 3)] == [100, 150, 200, 250, inf] and least([], 1) == inf
    fast, slow = [(0.5, 6.0), (0.6, 4.0), (0.7, 2.0)], [(0.5, 10.0), (0.6, 8.0), (0.7, 4.0)]

    def said(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> tuple[str, str]:
        found = least_memory(over_budgets(moepic=ours, other=theirs), "moepic", ("other",))
        assert found is not None
        return found

    verdict, words = said(fast, slow)  # asked for 4, 6 and 8 ms
    assert verdict == HOLDS and "interpolation" in words
    assert "for 4.00 ms moepic 200.0 MB, other 300.0 MB" in words
    assert "for 6.00 ms moepic at most 100.0 MB, other 250.0 MB" in words and "100.0 MB 10.00 ms" in words
    assert said(slow, fast)[0] == NO
    assert said([(0.5, 10.0), (0.6, 9.0), (0.7, 2.0)], [(0.5, 9.0), (0.6, 8.0), (0.7, 4.0)])[0] == PART
    assert said([(0.5, 2.0), (0.6, 2.0)], [(0.5, 2.0), (0.6, 2.0)])[0] == OPEN
    assert least_memory(over_budgets(moepic=fast), "moepic", ("other",)) is None


def test_layers_differ_by_as_much_as_in_the_paper() -> None:
    def said(*rates: list[float]) -> str:
        sizes = {str(at): {"lfu": row} for at, row in enumerate(rates)}
        found = moepic.layers_differ({"hit_rate_by_layer": sizes, "tokens": 1000, "top_k": 4})
        assert found is not None and "up to 0.8 points" in found[1]
        return found[0]

    wide, narrow = [0.5, 0.6, 0.55], [0.5, 0.54, 0.52]
    assert (said(wide), said(wide, narrow), said(narrow)) == (HOLDS, PART, NO)
    assert moepic.layers_differ({"hit_rate": {}}) is None


def test_settings_of_lcp_matter_little_up_to_the_papers_share() -> None:
    def said(*most: float) -> str:
        row = {"rho": 0.25, "omega": 128, "hit_rate": 0.5}
        sizes = {
            str(at): [{**row, "tpot_ms": 100.0, "default": True}, {**row, "tpot_ms": 100 + more, "default": False}]
            for at, more in enumerate(most)
        }
        found = moepic.matters_little({"lcp_settings": sizes})
        assert found is not None and f"spread {most[0]:.1f}%" in found[1]
        return found[0]

    assert (said(6.0), said(6.0, 6.2), said(7.0)) == (HOLDS, PART, NO) and moepic.matters_little({}) is None


def test_a_best_distance_is_at_neither_end() -> None:
    def said(**ms: float) -> tuple[str, str] | None:
        rows = {name[1:]: {"hit_rate": 0.5, "late_rate": 0.1, "tpot_ms": one} for name, one in ms.items()}
        return finemoe.best_distance({"distance": {"share": "50.0%", "rows": rows}})

    assert (best := said(d1=9.0, d10=8.0, d2=7.0)) and best[0] == HOLDS and "least time is 2 ahead" in best[1]
    assert (first := said(d1=6.0, d2=7.0, d3=8.0)) and first[0] == NO
    assert (last := said(d1=9.0, d2=7.0, d10=6.0)) and last[0] == NO
    assert said(d1=9.0, d2=7.0) is None and finemoe.best_distance({}) is None


def test_the_heaviest_are_recalled_best_where_recall_falls_with_every_rank() -> None:
    def said(*layers: list[float]) -> str:
        found = speculating.heaviest_best(
            {"predictors": {"default_vectors": {"recall_by_rank": [[0.0, 1.0], *layers]}}}
        )
        assert found is not None
        return found[0]

    assert said([0.9, 0.5], [0.6, 0.7]) == HOLDS and said([0.5, 0.9]) == NO == said([0.5, 0.5])
    assert said([0.9, 0.4, 0.5]) == PART
    assert speculating.heaviest_best({"predictors": {"default_vectors": {"recall_by_layer": [0.1]}}}) is None
