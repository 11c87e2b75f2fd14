"""papers: the page is current, all that a row cites exists, and answers are what the result files say."""

from __future__ import annotations

import inspect
import re
import shlex
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.store import results as stored
from bench.commands import papers as command
from bench.papers import PAPERS, finemoe, moepic, parts, sources
from bench.papers import speculating as speculating_paper
from bench.papers.document import StoredResults, answers, counted, markdown, text
from bench.papers.over_budgets import correlation, hits_save_time, least, least_memory
from bench.papers.parts import HOLDS, NEVER, NO, OPEN, PART, REPAIRS, VERDICTS, Answer, Paper, Row
from bench.quality import lossy, speculating
from bench.routing import expert_maps, methods_result
from core.measure.evaluate.modes import chosen, modes_of
from core.settings.config import params
from core.settings.presets import preset


class Drawn:
    """Results by bench, newest first."""

    def __init__(self, **benches: list[dict[str, Any]]) -> None:
        self._benches = benches

    def newest(self, bench: str) -> list[tuple[str, dict[str, Any]]]:
        found = self._benches.get(bench, [])
        return [(f"{bench}-{one['date'][:10].replace('-', '')}-000000.json", one) for one in found]


ROOT = Path(__file__).resolve().parents[2]
ROWS = [pytest.param(row, id=f"{paper.name}: {row.where}") for paper in PAPERS for row in paper.rows]


def test_the_page_on_the_papers_is_current() -> None:
    written = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert written == markdown(PAPERS, StoredResults()) + "\n", (
        "run: python launch.py papers --markdown > docs/papers.md"
    )


def test_no_row_is_without_an_answer_or_a_reason() -> None:
    results = StoredResults()
    for paper in PAPERS:
        assert len({row.where for row in paper.rows}) == len(paper.rows)
        for row, answer in answers(paper, results):
            assert answer.verdict in VERDICTS and answer.text.strip() and row.asks.strip(), row.where
            assert (answer.verdict != NEVER) or not row.command, row.where
            assert bool(answer.date) == bool(answer.file)
            for file in answer.file.split(", ") if answer.file else ():
                assert (stored.FOLDERS[0] / file).is_file()
            assert answer.date[:10].replace("-", "") in answer.file


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_files_settings_and_presets_that_are_cited_exist(paper: Paper) -> None:
    known = params()
    for part in paper.parts:
        assert (ROOT / part.file).is_file(), part.file
        for setting in part.settings:
            name, equals, value = setting.partition("=")
            assert name in known, setting
            if equals:
                known[name].check(value)
    assert paper.presets
    for name in paper.presets:
        preset(name)


@pytest.mark.parametrize("row", ROWS)
def test_commands_and_claims_that_are_cited_exist(row: Row) -> None:
    assert set(row.touched) <= REPAIRS.keys()
    if row.command:
        args = cli.parse(shlex.split(row.command))
        assert args.command in ("bench", "eval")
        if args.command == "eval":
            chosen(args.modes)
            assert args.save == Path()
    known = {
        "methods": set(methods_result.ORDERINGS),
        "lossy": {one.text for one in lossy.CLAIMS} | set(speculating.CLAIMS),
    }
    modes = {mode.name for mode in modes_of()}
    source: Any = row.source
    if isinstance(source, sources.Claims) and source.bench == "expert_maps":
        assert source.claim in inspect.getsource(expert_maps)
    elif isinstance(source, sources.Claims):
        assert source.claim in known[source.bench]
    elif isinstance(source, sources.Modes):
        assert {mode for pair in source.pairs for mode in pair} <= modes
    elif isinstance(source, sources.Keeps):
        assert {source.mode, source.base} <= modes
    elif isinstance(source, sources.Systems):
        for name in (source.better, *source.worse):
            preset(name)


def test_launch_py_commands_in_texts_exist() -> None:
    page = markdown(PAPERS, StoredResults())
    for line in re.findall(r"python launch\.py ([^`\n|,.;]*)", page):
        words = shlex.split(line)
        assert words[0] in cli.MODULES, line


def evaluated(date: str, busy: float = 0.0, **matches: float) -> dict[str, Any]:
    return {
        "date": date,
        "rows": [
            {
                "mode": mode,
                "residency": 0.5,
                "problem": "",
                "exact_match": match,
                "exact_match_se": 0.1,
                "tok_s": 10 * match,
                "others_cores": busy,
            }
            for mode, match in matches.items()
        ],
    }


def test_an_ordering_is_read_from_the_newest_result_that_has_it() -> None:
    claim = "says"
    old = {"date": "2026-01-01T00:00:00+00:00", "orderings": [{"claim": claim, "figure": "kl", "holds": "yes"}]}
    new = {"date": "2026-01-02T00:00:00+00:00", "orderings": []}
    source = sources.Claims("methods", claim, ("a", "b"))
    found = source.answer(Drawn(methods=[new, old]))
    assert (found.verdict, found.file) == (HOLDS, "methods-20260101-000000.json") and "a above b" in found.text
    assert source.answer(Drawn()).verdict == OPEN
    lived = {"figure": "hit_rate", "holds": "no", "pairs": {"25%": [0.1, 0.2]}}
    waited = {"holds_waited_for": "yes", "pairs_waited_for": {"25%": [0.3, 0.2]}}
    found = source.answer(Drawn(methods=[{**new, "orderings": [{"claim": claim, **lived, **waited}]}]))
    assert found.verdict == NO and "a bound: holds (25% 30.0 % / 20.0 %)" in found.text
    assert sources.together([HOLDS, NO, OPEN]) == PART and sources.together([OPEN]) == OPEN


def test_modes_are_compared_and_times_while_other_programs_ran_are_not() -> None:
    one = evaluated("2026-01-01T00:00:00+00:00", exact=1.0, buddy=0.8, drop=0.9)
    pairs = (("exact", "buddy"), ("buddy", "drop"))
    found = sources.Modes(pairs).answer(Drawn(eval=[one]))
    assert found.verdict == PART and "1 of 2 orderings hold" in found.text and "10 points" in found.text
    noisy = evaluated("2026-01-02T00:00:00+00:00", 0.9, exact=1.0, buddy=0.8)
    fast = sources.Modes((("exact", "buddy"),), "tok_s")
    assert fast.answer(Drawn(lossy=[noisy])).verdict == OPEN
    calm = fast.answer(Drawn(eval=[one], lossy=[noisy]))
    assert (calm.verdict, calm.date) == (HOLDS, "2026-01-01T00:00:00+00:00")
    assert sources.Modes(pairs, residency=0.75).answer(Drawn(eval=[one])).verdict == OPEN
    assert sources.Keeps("buddy", "exact").answer(Drawn(eval=[one])).verdict == HOLDS  # within two errors
    assert (
        sources.Keeps("buddy", "exact").answer(Drawn(eval=[evaluated(one["date"], exact=1, buddy=0.7)])).verdict == NO
    )


def test_the_first_source_with_an_answer_is_taken() -> None:
    sought = sources.Reading("methods", lambda result: (HOLDS, "x")), sources.Reading("lossy", lambda result: (NO, "y"))
    dated = [{"date": "2026-01-01T00:00:00+00:00"}]
    first = sources.First(sought)
    assert first.answer(Drawn(lossy=dated)).verdict == NO and first.answer(Drawn()).verdict == OPEN
    assert first.answer(Drawn(lossy=dated, methods=dated)).text == "x"


def test_systems_are_compared_at_every_budget() -> None:
    result = {
        "date": "2026-01-01T00:00:00+00:00",
        "model": "demo",
        "budgets": {"25%": {}, "50%": {}},
        "systems": {
            "finemoe": {"25%": {"tpot_ms": 9.0}, "50%": {"tpot_ms": 8.0}},
            "se_moe": {"25%": {"tpot_ms": 10.0}, "50%": {"problem": "too small"}},
            "promoe": {"25%": {"tpot_ms": 8.0}, "50%": {"tpot_ms": 8.5}},
        },
    }
    assert sources.Systems("finemoe", ("se_moe",)).answer(Drawn(systems=[result])).verdict == HOLDS
    found = sources.Systems("finemoe", ("se_moe", "promoe")).answer(Drawn(systems=[result]))
    assert found.verdict == PART and "finemoe 9.0 ms" in found.text
    other = {**result, "date": "2026-01-02T00:00:00+00:00", "model": "generated"}
    older = {**result, "date": "2025-12-01T00:00:00+00:00"}
    both = sources.Systems("finemoe", ("se_moe",)).answer(Drawn(systems=[other, result, older]))
    assert both.text.count("finemoe") == 4 and (both.date, both.file.count(", ")) == (result["date"], 1)
    disturbed = {**result, "others_cores": 1.0}
    assert sources.Systems("finemoe", ("se_moe",)).answer(Drawn(systems=[disturbed])).verdict == OPEN


def test_what_is_older_than_a_repair_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    repairs = {"done": parts.Repair("a is b", "2026-01-02T00:00:00+00:00"), "ahead": parts.Repair("c is d", "")}
    monkeypatch.setattr(parts, "REPAIRS", repairs)
    row = Row("Table 1", "x", sources.Claims("methods", "y"), ("done", "ahead"))
    old, new = (Answer(HOLDS, "z", f"2026-01-0{day}T00:00:00+00:00", "f") for day in (1, 3))
    assert row.before(old) == (repairs["done"], repairs["ahead"]) and row.before(new) == (repairs["ahead"],)
    assert row.missing(old) and not row.missing(new) and row.missing(Answer(OPEN, "z"))
    assert not Row("Table 1", "x", sources.never("y")).missing(Answer(OPEN, "z"))
    assert counted([(row, old), (row, new)]) == "2 rows: 2 holds. 2 measured before a repair."
    assert all(not one.landed or datetime.fromisoformat(one.landed).tzinfo for one in REPAIRS.values())


def test_the_command_prints_all_tables_and_runs_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["papers"]) == 0
    printed = capsys.readouterr().out
    assert all(paper.title in printed and text(paper, StoredResults()) in printed for paper in PAPERS)
    assert cli.main(["papers", "moepic", "--json"]) == 0
    assert '"moepic"' in (found := capsys.readouterr().out) and '"finemoe"' not in found
    assert cli.main(["papers", "nobody"]) == 2 and "Choose some of" in capsys.readouterr().err
    assert cli.main(["papers", "--list"]) == 2
    monkeypatch.setattr(stored, "FOLDERS", [tmp_path])  # nothing was measured yet
    assert cli.main(["papers", "--run", "expertflow", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()[-4:]
    assert {"python launch.py bench methods", "python launch.py bench systems"} <= set(listed)
    ran: list[list[str]] = []
    monkeypatch.setattr("app.cli.main", lambda words: ran.append(words) or len(ran) // 2)
    assert command.asked_again([PAPERS[3]], False) is False  # the second fails, and the rest is not run
    assert ran == [["bench", "methods"], ["bench", "batch"]]


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
        found = speculating_paper.heaviest_best(
            {"predictors": {"default_vectors": {"recall_by_rank": [[0.0, 1.0], *layers]}}}
        )
        assert found is not None
        return found[0]

    assert said([0.9, 0.5], [0.6, 0.7]) == HOLDS and said([0.5, 0.9]) == NO == said([0.5, 0.5])
    assert said([0.9, 0.4, 0.5]) == PART
    assert speculating_paper.heaviest_best({"predictors": {"default_vectors": {"recall_by_layer": [0.1]}}}) is None
