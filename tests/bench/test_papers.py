"""papers: the page is current, whatever a row cites exists, and answers are what the result files say."""

from __future__ import annotations

import inspect
import re
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.store import results as stored
from bench.commands import papers as command
from bench.papers import PAPERS, parts, sources
from bench.papers.document import StoredResults, answers, counted, markdown, text
from bench.papers.parts import HOLDS, NEVER, NO, OPEN, PART, REPAIRS, VERDICTS, Answer, Paper, Row
from bench.quality import lossy, speculating
from bench.routing import expert_maps, methods_result
from core.evaluate.modes import chosen, modes_of
from core.settings.config import params
from core.settings.presets import preset
from tests.bench.drawn import Drawn

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
        assert all(claim in inspect.getsource(expert_maps) for claim in source.claims)
    elif isinstance(source, sources.Claims):
        assert set(source.claims) <= known[source.bench]
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
    source = sources.Claims("methods", (claim,), ("a", "b"))
    found = source.answer(Drawn(methods=[new, old]))
    assert (found.verdict, found.file) == (HOLDS, "methods-20260101-000000.json") and "a above b" in found.text
    assert source.answer(Drawn()).verdict == OPEN
    lived = {"figure": "hit_rate", "holds": "no", "pairs": {"25%": [0.1, 0.2]}}
    waited = {"holds_waited_for": "yes", "pairs_waited_for": {"25%": [0.3, 0.2]}}
    found = source.answer(Drawn(methods=[{**new, "orderings": [{"claim": claim, **lived, **waited}]}]))
    assert found.verdict == NO and "a bound: holds (25% 30.0 % / 20.0 %)" in found.text
    assert sources.together([HOLDS, NO, OPEN]) == PART and sources.together([OPEN]) == OPEN


def test_modes_are_compared_and_times_beside_other_programs_are_not() -> None:
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


def test_what_is_older_than_a_repair_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    repairs = {"done": parts.Repair("a is b", "2026-01-02T00:00:00+00:00"), "ahead": parts.Repair("c is d", "")}
    monkeypatch.setattr(parts, "REPAIRS", repairs)
    row = Row("Table 1", "x", sources.never("y"), "bench methods", ("done", "ahead"))
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
