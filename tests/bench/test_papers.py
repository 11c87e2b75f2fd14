"""papers: the page is current, all that a row cites exists, and answers are what the blocks of the results say."""

import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.store import results as stored
from bench.commands import papers as command
from bench.models.sizes import FULL, is_generated
from bench.papers import PAPERS, parts
from bench.papers.document import StoredResults, answers, counted, markdown, remarks, text
from bench.papers.parts import HOLDS, NEVER, NO, PART, REPAIRS, UNTOLD, VERDICTS, Ask, Paper, Row, never
from bench.papers.verdicts import LOWER, SHARES, STRONG, answer, blocks_of, copies_over_compute
from core.engine.manifest import versions
from core.measure.evaluate.modes import chosen, modes_of
from core.settings.config import params
from core.settings.presets import preset


class Drawn:
    def __init__(self, **benches: list[dict[str, Any]]) -> None:
        self._benches = benches

    def newest(self, bench: str) -> list[tuple[str, dict[str, Any]]]:
        found = self._benches.get(bench, [])
        return [(f"{bench}-{one['date'][:10].replace('-', '')}-000000.json", one) for one in found]


ROOT = Path(__file__).resolve().parents[2]
NOW, THEN = "2026-01-02T00:00:00+00:00", "2026-01-01T00:00:00+00:00"


@pytest.fixture(scope="module")
def results() -> StoredResults:
    return StoredResults()


def test_the_page_is_current_and_names_commands_that_exist(results: StoredResults) -> None:
    page = markdown(PAPERS, results)
    written = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert written == page + "\n", "run: python launch.py papers --markdown > docs/papers.md"
    for line in re.findall(r"python launch\.py ([^`\n|,.;]*)", page):
        assert shlex.split(line)[0] in cli.MODULES, line


def test_no_row_is_without_an_answer_or_a_reason(results: StoredResults) -> None:
    for paper in PAPERS:
        assert len({row.where for row in paper.rows}) == len(paper.rows)
        for row, one in answers(paper, results):
            assert one.verdict in VERDICTS and one.text.strip() and row.asks.strip(), row.where
            assert bool(one.date) == bool(one.files)
            assert all((stored.FOLDERS[0] / file).is_file() for file in one.files)


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


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_commands_and_subjects_that_are_cited_exist(paper: Paper) -> None:
    for row in paper.rows:
        assert set(row.touched) <= REPAIRS.keys(), row.where
        if not isinstance(ask := row.source, Ask):
            continue
        args = cli.parse(shlex.split(row.command))
        assert args.command in ("bench", "eval") and ask.pairs, row.where
        named = {one for pair in ask.pairs for one in pair if isinstance(one, str)}
        if args.command == "eval":
            assert named <= {mode.name for mode in chosen(args.modes)} <= {mode.name for mode in modes_of()}, row.where
            assert args.save == Path(), row.where
        elif ask.bench == "systems":
            for name in ask.at or named:
                preset(name)


def test_figures_have_a_direction_once() -> None:
    assert len(set(LOWER)) == len(LOWER) and len(set(SHARES)) == len(SHARES)
    figures = {row.source.figure for paper in PAPERS for row in paper.rows if isinstance(row.source, Ask)}
    assert set(LOWER) <= figures, "no figure is named that no row has"


def result(
    model: str = "demo", date: str = NOW, /, **subjects: Sequence[float] | dict[str, Sequence[float]]
) -> dict[str, Any]:
    """A result whose blocks are those of subjects, or of subjects at groups."""
    return {"model": model, "date": date, "versions": versions(), "of": subjects}


def asked(*pairs: tuple[str, str | float], blocks: str = "of/{}", **more: Any) -> Row:
    return Row("Table 1", "x", Ask("methods", blocks, pairs, **{"figure": "hit_rate", **more}))


HIGH, LOW, NOISY = [0.8, 0.7, 0.9, 0.8], [0.5, 0.4, 0.6, 0.5], [0.9, 0.1, 0.8, 0.3]


def test_an_ordering_holds_only_beyond_its_noise() -> None:
    drawn = Drawn(methods=[result(a=HIGH, b=LOW, c=NOISY)])
    assert answer(asked(("a", "b")), drawn).verdict == HOLDS
    assert answer(asked(("b", "a")), drawn).verdict == NO
    assert answer(asked(("a", "c")), drawn).verdict == UNTOLD, "the mean is higher, the blocks differ by more"
    assert answer(asked(("a", "b"), ("a", "c")), drawn).verdict == PART
    assert answer(asked(("a", "c"), ("b", "a")), drawn).verdict == NO
    assert answer(asked(("b", "a"), figure="kl"), drawn).verdict == HOLDS, "less is better"
    assert "a 80.0 % / b 50.0 % (+30.0 % ± 0.0 %)" in answer(asked(("a", "b")), drawn).text


def test_many_comparisons_need_more_than_one() -> None:
    """A difference that one interval holds apart from 0 is within that of twenty at once."""
    a, b = [0.80, 0.72, 0.85, 0.78], [0.70, 0.68, 0.74, 0.66]
    drawn = Drawn(methods=[result(a=a, b=b)])
    assert answer(asked(("a", "b")), drawn).verdict == HOLDS
    assert answer(asked(*[("a", "b")] * 20), drawn).verdict == UNTOLD


def test_a_correlation_above_nothing_holds_in_part() -> None:
    row = asked(("a", 0.0), ("a", STRONG), figure="correlation")
    for values, verdict in (([0.7, 0.8, 0.75], HOLDS), ([0.2, 0.3, 0.25], PART), ([-0.4, 0.9, 0.3], UNTOLD)):
        assert answer(row, Drawn(methods=[result(a=values)])).verdict == verdict
    assert answer(row, Drawn(methods=[result(a=[-0.3, -0.2, -0.25])])).verdict == NO


def test_as_good_is_within_a_margin() -> None:
    same, worse = [0.79, 0.71, 0.89, 0.8], [0.6, 0.5, 0.7, 0.6]
    drawn = Drawn(methods=[result(exact=HIGH, same=same, worse=worse, noisy=NOISY)])
    for name, verdict in (("same", HOLDS), ("worse", NO), ("noisy", UNTOLD)):
        assert answer(asked((name, "exact"), margin=0.05), drawn).verdict == verdict


def test_subjects_are_compared_within_their_groups_and_at_those_that_are_asked() -> None:
    one = result(a={"25%": HIGH, "50%": LOW}, b={"25%": LOW, "50%": HIGH, "75%": LOW})
    row = asked(("a", "b"), blocks="of/{}/{at}")
    found = answer(row, Drawn(methods=[one]))
    assert found.verdict == PART and "25%: a" in found.text and "1 hold, 1 against" in found.text
    assert answer(asked(("a", "b"), blocks="of/{}/{at}", at=("25%",)), Drawn(methods=[one])).verdict == HOLDS
    some = answer(asked(("a", "b"), ("a", "c"), blocks="of/{}/{at}", at=("25%",)), Drawn(methods=[one]))
    assert "Not in it: a / c." in some.text
    across = asked(("50%", "25%"), blocks="of/{at}/{}", at=("b",))
    assert answer(across, Drawn(methods=[one])).verdict == HOLDS


def test_rows_of_an_evaluation_are_found_by_mode_and_residency() -> None:
    rows = [{"mode": "exact", "residency": 0.5, "blocks": {"kl": [1, 2]}}, {"mode": "drop", "residency": 0.5}]
    assert blocks_of({"rows": rows}, "rows/{}/{at}/blocks/kl") == {"0.5": {"exact": [1.0, 2.0]}}
    assert blocks_of({"a": [1, None], "b": [1], "c": "x"}, "{}") == {"": {"b": [1.0]}}


def test_means_alone_tell_nothing_apart_and_the_file_is_named() -> None:
    row = asked(("a", "b"))
    found = answer(row, Drawn(methods=[{"model": "demo", "date": NOW, "of": {"a": 0.9, "b": 0.1}}]))
    assert (found.verdict, found.unmeasured, found.due) == (UNTOLD, True, True)
    assert "no paired data in `methods-20260102-000000.json`" in found.text
    found = answer(row, Drawn(methods=[result(a=HIGH[:2], b=LOW[:2])]))
    assert found.verdict == UNTOLD and "fewer than 3 blocks" in found.text and not found.due
    nothing = answer(row, Drawn())
    assert (nothing.verdict, nothing.due) == (NEVER, True) and "No result" in nothing.text


def test_every_model_is_shown_with_its_newest_result_that_has_blocks() -> None:
    means = {"model": "demo", "date": NOW, "of": {"a": 0.9}}
    drawn = Drawn(methods=[means, result("other", a=LOW, b=HIGH), result("demo", THEN, a=HIGH, b=LOW)])
    found = answer(asked(("a", "b")), drawn)
    assert found.verdict == PART and found.date == THEN and len(found.files) == 2
    assert "demo (trained weights" in found.text and "other (trained weights" in found.text


def test_a_budget_is_asked_alone() -> None:
    drawn = Drawn(methods=[{**result(a=LOW, b=HIGH), "budget": "33%"}, {**result(a=HIGH, b=LOW), "budget": "20%"}])
    assert answer(asked(("a", "b"), budget="20%"), drawn).verdict == HOLDS
    assert answer(asked(("a", "b"), budget="50%"), drawn).verdict == NEVER


def test_random_weights_answer_nothing_that_is_learned() -> None:
    name = f"{FULL.name}-v1-0"
    assert is_generated(name) and is_generated("generated") and not is_generated("demo")
    drawn = Drawn(methods=[result(name, a=HIGH, b=LOW)])
    assert answer(asked(("a", "b")), drawn).verdict == HOLDS
    found = answer(asked(("a", "b"), learned=True), drawn)
    assert found.verdict == NEVER and "random weights say nothing" in found.text and not found.due
    both = Drawn(methods=[result(name, a=LOW, b=HIGH), result("demo", a=HIGH, b=LOW)])
    found = answer(asked(("a", "b"), learned=True), both)
    assert found.verdict == HOLDS and "random weights say nothing" in found.text


def test_another_regime_is_not_asked() -> None:
    def at(copy_ms: float) -> dict[str, Any]:
        parts = {"on demand": {"copy_ms": copy_ms, "compute_ms": 10.0}}
        return {**result(a=HIGH, b=LOW), "speculating": {"tpot": {"64": {"systems": parts}}}}

    row = asked(("a", "b"), copies=3.0)
    assert answer(row, Drawn(methods=[at(80.0)])).verdict == HOLDS
    found = answer(row, Drawn(methods=[at(9.0)]))
    assert found.verdict == NEVER and "copying takes 0.9 of computing a layer here" in found.text
    sizes = {"top_k": 8, "layers": 4, "expert_bytes": 5e6, "link_gbps": 10.0, "resident": {"tpot_ms": 8.0}}
    assert copies_over_compute(sizes) == {"": pytest.approx(2.0)} and copies_over_compute({}) == {}


def test_times_of_another_arithmetic_are_stale_and_those_of_a_busy_machine_are_left_out() -> None:
    timed = asked(("b", "a"), figure="tpot_ms")
    old = {**result(a=HIGH, b=LOW), "versions": {name: one for name, one in versions().items() if name != "arithmetic"}}
    found = answer(timed, Drawn(methods=[old]))
    assert found.verdict == HOLDS and "earlier arithmetic" in found.stale and found.due
    assert "**Stale**: demo: timed with an earlier arithmetic." in remarks(found)
    assert not answer(timed, Drawn(methods=[result(a=HIGH, b=LOW)])).stale
    assert not answer(asked(("a", "b")), Drawn(methods=[old])).stale, "counts are no times"
    busy = {**result(a=HIGH, b=LOW), "others_cores": 1.0}
    assert answer(timed, Drawn(methods=[busy])).verdict == NEVER
    assert answer(asked(("a", "b")), Drawn(methods=[busy])).verdict == HOLDS


def test_what_is_older_than_a_repair_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "REPAIRS", {"done": parts.Repair("a is b", "2026-01-01T12:00:00+00:00")})
    ask = asked(("a", "b")).source
    row = Row("Table 1", "x", ask, ("done",))
    old, new = (answer(row, Drawn(methods=[result("demo", date, a=HIGH, b=LOW)])) for date in (THEN, NOW))
    assert old.stale == "demo: before a is b" and old.due and not new.due
    assert not answer(Row("Table 1", "x", never("y")), Drawn()).due
    assert counted([(row, old), (row, new)]) == "2 rows: 2 holds. 1 are stale, 0 have no paired data yet."
    assert all(datetime.fromisoformat(one.landed).tzinfo for one in REPAIRS.values())


def test_the_command_runs(
    results: StoredResults, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["papers"]) == 0
    printed = capsys.readouterr().out
    assert all(paper.title in printed for paper in PAPERS)
    assert all(text(paper, results) in printed for paper in (PAPERS[0], PAPERS[-1]))
    assert cli.main(["papers", "moepic", "--json"]) == 0
    assert '"moepic"' in (found := capsys.readouterr().out) and '"finemoe"' not in found
    assert cli.main(["papers", "nobody"]) == 2 and "Choose some of" in capsys.readouterr().err
    assert cli.main(["papers", "--list"]) == 2
    monkeypatch.setattr(stored, "FOLDERS", [tmp_path])  # nothing was measured yet
    assert cli.main(["papers", "--run", "expertflow", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()[-5:]
    assert {"python launch.py bench methods", "python launch.py bench systems"} <= set(listed)
    ran: list[list[str]] = []
    monkeypatch.setattr("app.cli.main", lambda words: ran.append(words) or len(ran) // 2)
    assert command.asked_again([PAPERS[3]], False) is False  # the second fails, and the rest is not run
    assert ran == [["bench", "path"], ["bench", "systems"]]
