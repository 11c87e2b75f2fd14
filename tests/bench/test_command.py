"""The commands of benches: loaded by name, and what `bench` prints, saves and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import launch
from app import cli
from app.store import results

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] == "bench" else find(name, *more)
from app import cli
assert cli.parse(["doctor"]).command == "doctor" and not {"bench", "papers", "accept"} & cli.MODULES.keys()
assert not [name for name in sys.modules if name.partition(".")[0] == "bench"]
"""


def test_the_application_runs_without_the_folder_of_benches() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, check=True)


def test_a_bench_prints_its_table_and_saves_its_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(
        model: str = "demo", budget: str = "50%", rounds: int = 5, say: Callable[[str], None] = print
    ) -> dict[str, object]:
        say("round 1 of 2")
        return {"asked": [model, budget, rounds]}

    monkeypatch.setattr("bench.quick.run", run)
    monkeypatch.setattr("bench.quick.table", lambda result: f"a table of {result['asked'][0]}")
    file = tmp_path / "result.json"
    assert cli.main(["bench", "quick", "--rounds", "2", "--budget", "25%", "--save", str(file)]) == 0
    assert capsys.readouterr() == ("a table of demo\n", f"round 1 of 2\nWritten to {file}\n")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert (saved["bench"], saved["asked"]) == ("quick", ["demo", "25%", 2])
    monkeypatch.setattr("app.store.results.FOLDERS", [tmp_path / "results"])
    assert cli.main(["bench", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [json.loads(f.read_text(encoding="utf-8")) for f in (tmp_path / "results").iterdir()] == [last]
    assert cli.main(["bench", "--save", str(tmp_path / "no" / "such.json")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert cli.main(["bench", "--keep", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench quick has no --keep. Leave it out.\n"


def test_an_installed_copy_keeps_results_among_the_data_and_reads_those_it_came_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    came, home = tmp_path / "came", tmp_path / "home"
    results.write(came / "quick-20260101-000000.json", {"bench": "quick"})
    monkeypatch.setattr(results, "FOLDERS", [came])
    monkeypatch.setattr(launch, "INSTALLED", True)
    monkeypatch.setenv("MOESTRO_HOME", str(home))
    monkeypatch.setattr("bench.quick.run", lambda say: {"fresh": True})
    monkeypatch.setattr("bench.quick.table", str)
    for _ in range(2):  # a command may run another
        assert cli.main(["bench", "quick"]) == 0
    fresh = {file.parent for file, found in results.results("quick") if found.get("fresh")}
    assert fresh == {home / "bench" / "results"} and results.files("quick")[0].parent == came
    assert len(results.FOLDERS) == 2
