"""What suites share: turns, medians and intervals, tables, resuming, bounds, measuring processes, the command."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import cli
from app.start import installer
from app.store import results
from bench.commands import bench as command
from bench.harness import process
from bench.harness.figures import belady_misses_per_token, medians, overlapped_ms, ratio, spread
from bench.harness.process import GroupFiles, MemoryGroup, ended_well, group_files, measure
from bench.harness.report import goal, goal_lines
from bench.harness.resume import KeptRows
from bench.harness.run import Result, Run, Suite
from core import __version__
from core.errors import MoestroError
from core.memory.link import Pace, scaled_gbps
from core.system.wording import cell, grid
from tests.simulate.belady import belady_misses


@pytest.mark.parametrize("slots", [9, 10, 20, 24])
def test_misses_are_those_of_each_layer_with_its_share(slots: int) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([[rng.choice(8, 3, replace=False) for _ in range(40)] for _ in range(3)])
    shares = [slots // 3 + (layer < slots % 3) for layer in range(3)]
    counted = sum(belady_misses(of.tolist(), share) for of, share in zip(ids, shares, strict=True))
    assert belady_misses_per_token(ids, 8, slots) == counted / 40


def test_the_overlap_bound_and_the_scaled_link_are_their_formulas() -> None:
    pace = Pace(gbps=1.0, latency_us=0.0)
    assert overlapped_ms(2.0, 3.0, 1_000_000, pace) == 3.0
    assert overlapped_ms(5.0, 3.0, 1_000_000, pace) == 5.0
    assert scaled_gbps(layer_ms=1.0, size_bytes=770_000, latency_us=0.0) == 1.0


ECHO = "tests.bench.echo"


MB = 1 << 20


def test_a_process_answers_and_says_what_it_took() -> None:
    found = measure(ECHO, {"kind": "holds", "bytes": 64 * MB}, [])
    assert (found["kind"], found["held"]) == ("holds", 64 * MB)
    assert found["peak_high"] - found["idle_bytes"] >= 63 * MB
    assert ended_well(found, "It") is found


def test_a_process_that_fails_says_why() -> None:
    found = measure(ECHO, {"kind": "fails"}, [])
    assert found["failed"] == "ValueError: no such luck"
    with pytest.raises(MoestroError, match="It did not work: ValueError: no such luck"):
        ended_well(found, "It")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_dropped_files_are_not_cached(tmp_path: Path) -> None:
    inner = tmp_path / "model" / "inner"
    inner.mkdir(parents=True)
    for file in (inner / "a", tmp_path / "model" / "b", tmp_path / "c"):
        file.write_bytes(os.urandom(MB))
    (tmp_path / "model" / "empty").touch()
    paths = [tmp_path / "model", tmp_path / "c"]
    if process.drop(paths):
        pytest.skip("this file system lives in memory")
    with (tmp_path / "c").open("rb", buffering=0) as handle:
        assert process.cached(handle.fileno()) == 0
        handle.read()
        assert process.cached(handle.fileno()) == MB
        assert process.drop(paths) == process.cached(handle.fileno()) == 0


def test_without_advice_nothing_is_dropped_or_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert process.drop([tmp_path]) is None


def test_groups_of_version_1_are_made_inside_the_own_one(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu,memory:/a/b\n0::/\n", encoding="utf-8")
    found = group_files(tmp_path, tmp_path / "own")
    assert (found.parent, found.limit) == (tmp_path / "memory" / "a" / "b", "memory.limit_in_bytes")


def test_groups_of_version_2_are_made_next_to_the_own_one(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/user/session\n", encoding="utf-8")
    (tmp_path / "user").mkdir()
    with pytest.raises(MoestroError, match="does not pass the memory controller on"):
        group_files(tmp_path, tmp_path / "own")
    (tmp_path / "user" / "cgroup.subtree_control").write_text("cpu memory\n", encoding="utf-8")
    found = group_files(tmp_path, tmp_path / "own")
    assert (found.parent, found.limit) == (tmp_path / "user", "memory.max")
    with pytest.raises(MoestroError, match="no control groups"):
        group_files(tmp_path, tmp_path / "none")


def test_a_group_without_limits_is_refused_and_removed(tmp_path: Path) -> None:
    where = GroupFiles(tmp_path, "limit", "swap", "used", "peak")
    with pytest.raises(MoestroError, match="cannot be made here"), MemoryGroup("x", where):
        pass
    assert not list(tmp_path.iterdir())


def test_a_limit_holds_and_is_lifted_with_its_group() -> None:
    try:
        with MemoryGroup("test") as group:
            path = group.path
    except MoestroError as error:
        pytest.skip(str(error))
    assert not path.exists()
    enough = measure(ECHO, {"kind": "holds", "bytes": 16 * MB}, [], limit=64 * MB)
    assert enough["held"] == 16 * MB
    assert 16 * MB <= enough["charged_bytes"] <= enough["limit_bytes"]
    much = measure(ECHO, {"kind": "holds", "bytes": 128 * MB}, [], limit=64 * MB)
    assert "more memory than the limit" in much["failed"]
    assert not list(path.parent.glob(f"moestro-{os.getpid()}-*"))


ROOT = Path(__file__).resolve().parents[2]


def drawn_suite(monkeypatch: pytest.MonkeyPatch, found: Result) -> None:
    """In the place of the suite `quick`, which is not run."""

    def measure(run: Run, model: str = "demo", budget: str = "50%", rounds: int = 5) -> Result:
        run.say("round 1 of 2")
        return {"asked": [model, budget, rounds], **found}

    monkeypatch.setattr(command, "suite", lambda name: Suite(measure, lambda r: [f"a table of {r['asked'][0]}"]))


def test_tables_and_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn_suite(monkeypatch, {})
    file = tmp_path / "result.json"
    assert cli.main(["bench", "quick", "--rounds", "2", "--budget", "25%", "--save", str(file)]) == 0
    assert capsys.readouterr() == ("a table of demo\n", f"round 1 of 2\nWritten to {file}\n")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert (saved["bench"], saved["asked"]) == ("quick", ["demo", "25%", 2])
    assert saved["date"] and saved["moestro"] == __version__ and saved["versions"] and saved["device"]
    monkeypatch.setattr("app.store.results.FOLDERS", [tmp_path / "results"])
    assert cli.main(["bench", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [json.loads(f.read_text(encoding="utf-8")) for f in (tmp_path / "results").iterdir()] == [last]
    assert cli.main(["bench", "--save", str(tmp_path / "no" / "such.json")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert cli.main(["bench", "--keep", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench quick has no --keep. Leave it out.\n"
    with pytest.raises(SystemExit):
        cli.main(["bench", "nothing"])
    assert "there is no bench 'nothing'" in capsys.readouterr().err


def test_an_installed_copy_keeps_results_among_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    came, home = tmp_path / "came", tmp_path / "home"
    results.write(came / "quick-20260101-000000.json", {"bench": "quick"})
    monkeypatch.setattr(results, "FOLDERS", [came])
    monkeypatch.setattr(installer, "INSTALLED", True)
    monkeypatch.setenv("MOESTRO_HOME", str(home))
    drawn_suite(monkeypatch, {"fresh": True})
    for _ in range(2):  # a command may run another
        assert cli.main(["bench", "quick"]) == 0
    fresh = {file.parent for file, found in results.results("quick") if found.get("fresh")}
    assert fresh == {home / "bench" / "results"} and results.files("quick")[0].parent == came
    assert len(results.FOLDERS) == 2


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "systems" / "rows.jsonl"
    first = KeptRows(file, {"tokens": 8})
    assert first.rows == [] and first.note("link", lambda: [1]) == [1]
    first.add({"round": 1})
    with file.open("a", encoding="utf-8") as torn:
        torn.write('{"round": 2, "tp')
    again = KeptRows(file, {"tokens": 8})
    assert again.rows == [{"round": 1}] and again.note("link", lambda: [2]) == [1]
    assert again.note("link", lambda: [3], anew=True) == [3]
    assert KeptRows(file, {"tokens": 9}).rows == []
    again.done()
    assert not file.exists()


def order(rounds: int, **how: Any) -> tuple[list[tuple[str, int]], dict[str, list[int]]]:
    seen: list[tuple[str, int]] = []

    def one(variant: str, number: int) -> int:
        seen.append((variant, number))
        return number

    kept: dict[str, list[int]] = {}

    def measure(run: Run) -> Result:
        kept.update(run.by_turns(("a", "b"), one, rounds, **how))
        return {}

    Suite(measure, lambda result: []).run()
    return seen, kept


def test_variants_take_turns_and_the_warm_up_is_not_kept() -> None:
    seen, kept = order(2)
    assert seen == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)] and kept == {"a": [1, 2], "b": [1, 2]}
    assert order(2, warm=False, alternate=False)[0] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_run_has_its_options_ends_its_files_and_says_what_it_was_measured_on(tmp_path: Path) -> None:
    folders: list[Path] = []

    def measure(run: Run, rounds: int = 5, size: int = 7) -> Result:
        folders.append(run.folder())
        return {"size": -size}

    made = Suite(measure, lambda result: [], small={"rounds": 1})
    assert made.options == {"rounds": 5, "size": 7}
    assert {"rounds": 1, "size": -8}.items() <= made.run(small=True, size=8).items(), "what is given wins"
    assert made.run()["rounds"] == 5 and made.run().keys() >= {"device", "versions", "threads", "cores"}
    assert not any(folder.exists() for folder in folders)
    made.run(keep=tmp_path / "stays")
    assert folders[-1] == tmp_path / "stays" and folders[-1].is_dir()


def test_figures_are_medians_and_ratios_those_of_the_same_round() -> None:
    assert medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0} and medians([]) == {}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert ratio([1, 4, 9, 5], [2, 2, 3, 0]) == 2.0 and ratio([1], [0]) is None


def test_columns_are_as_wide_as_their_cells() -> None:
    assert grid(("name", "ms"), [("a", "10.0"), ("longer", "2")]) == [
        "  name      ms",
        "  a       10.0",
        "  longer     2",
    ]
    assert grid(("", ""), [("a", cell(None)), ("b", cell(2e6, ".1f", 1e6))]) == ["  a    -", "  b  2.0"]


def test_a_goal_is_kept_missed_or_not_measured() -> None:
    goals = [goal("a", ">=", 3.0, 3.0), goal("b", "<=", 3.0, 3.1), goal("c", "<=", 3.0, None)]
    assert [one["kept"] for one in goals] == [True, False, None]
    assert goal_lines(goals) == ["  a: 3 (>= 3) kept", "  b: 3.1 (<= 3) MISSED", "  c: - (<= 3) not measured"]
