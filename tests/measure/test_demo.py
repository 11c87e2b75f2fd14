"""The demo model's exact match is that of an independent scoring, and the command prints one JSON object."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.store import results
from core.engine import Engine
from core.measure.evaluate import calibrated, run
from core.measure.evaluate.modes import chosen
from core.measure.evaluate.rows import FIGURES
from core.measure.evaluate.run import evaluate, gather
from demo.evaluate import load
from demo.scoring import encode, exact_matches
from tests.engine.profiles import drawn_profile
from tests.interrupted import interrupted
from tests.loaded import loaded

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "demo"
FACTS = [
    {"question": "Hi", "answer": "Yes.", "split": "trained"},
    {"question": "Ho", "answer": "No.", "split": "unseen"},
    {"question": "Ha", "answer": "No."},
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with loaded("demo", {"link": "own"}) as engine:
        yield engine


@pytest.mark.long(0.1)
def test_exact_match_is_that_of_an_independent_scoring(demo: Engine) -> None:
    material = gather(demo, 4, 0)
    plain, tokenizer = load(FOLDER, device="cpu")
    right = exact_matches(
        plain, encode(tokenizer, [{"question": one.text, "answer": one.answer} for one in material.questions])
    )
    assert [one.seen for one in material.questions] == [True] * 2 + [False] * 2
    exact, drop = evaluate(demo, chosen("exact,drop"), [0.75], material)
    assert (exact.exact_match, exact.unseen_match) == (sum(right[:2]) / 2, sum(right[2:]) / 2)
    assert exact.exact_match == 1.0 > (drop.exact_match or 0.0) and not exact.emulated and exact.perplexity is None
    assert drop.decoded < exact.decoded  # it stops at the first wrong token


@pytest.mark.long(0.1)
def test_what_lacks_in_the_profile_is_calibrated_and_the_rest_stays(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "READ", 30)
    modes = chosen("exact,buddy_rho1_tae,execute_default_vectors")
    demo.use_profile(None)
    assert calibrated.missing(demo, modes, demo.settings) == {"counts", "pairs", "tae", "defaults"}
    old = drawn_profile(demo)
    demo.use_profile(old)
    found = calibrated.calibrated(demo, modes)
    assert found is not None and found is demo.profile and found.has("tae") and found.has("pairs")
    assert found.defaults is old.defaults and found.nets.keys() == old.nets.keys()
    assert calibrated.calibrated(demo, modes) is found
    demo.use_profile(None)


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    file = tmp_path / "facts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in FACTS), encoding="utf-8")
    return file


def command(model: Path, *words: object) -> int:
    return cli.main(["eval", "--model", str(model), "--context", "64", *map(str, words)])


def test_the_command_prints_one_object(
    model: Path, facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrated, "READ", 40)
    monkeypatch.setattr(results, "FOLDERS", [tmp_path])
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("Some words that it can read, and some more of them.", encoding="utf-8")
    assert (
        command(
            model,
            "--modes",
            "exact,drop",
            "--residency",
            ".75,.5",
            "--questions",
            3,
            "--facts",
            facts,
            "--tokens",
            20,
            "--text",
            tmp_path / "text.txt",
            "--csv",
            tmp_path / "rows.csv",
            "--json",
            "--save",
        )
        == 0
    )
    said = capsys.readouterr()
    found: Any = json.loads(said.out.splitlines()[-1])
    [(file, saved)] = results.results("eval", tmp_path)
    assert saved == {"bench": "eval", "date": saved["date"], **found} and f"Written to {file}" in said.err
    assert [(one["mode"], one["residency"]) for one in found["rows"]] == [
        ("exact", 0.75),
        ("drop", 0.75),
        ("exact", 0.5),
        ("drop", 0.5),
    ]
    for one in found["rows"]:
        assert one["problem"] == "" and set(FIGURES) <= one.keys() and one["questions"] == 3 and one["positions"] == 20
        assert all(
            one[name] is not None
            for name in "exact_match unseen_match perplexity agreement substituted_rate link_bytes tok_s saved".split()
        )
    assert (
        found["units"].keys() == FIGURES.keys()
        and found["emulated"] is False
        and set(found["pareto"]) == {"0.75", "0.5"}
    )
    assert (
        found["questions"] == {"seen": 2, "unseen": 1, "source": str(facts), "note": ""}
        and found["text"]["tokens"] == 20
    )
    assert found["profile"]["tokens"] == 40 and "Residency 0.75:" in said.out and "Evaluated" in said.err
    assert len([line for line in (tmp_path / "rows.csv").read_text("utf-8").splitlines() if line[0] != "#"]) == 5


def test_ctrl_c_ends_it_and_writes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrated, "READ", 20)
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run, "evaluate", interrupted(run.evaluate))
    assert command(model, "--modes", "exact", "--residency", ".5", "--tokens", 8, "--csv", tmp_path / "rows.csv") == 130
    said = capsys.readouterr()
    assert "Stopped. Nothing was written." in said.err and said.out == "" and not (tmp_path / "rows.csv").exists()
    assert "There are no questions" in said.err


def test_the_list_of_modes_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--list", "--predictors", "gate"]) == 0
    said = capsys.readouterr().out
    assert "buddy_rho3_tae" in said and "execute_gate_true" in said and "execute_hybrid" not in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--modes", "magic"], "There is no mode 'magic'. Choose all, or some of: exact"),
        (["--residency", "1.5"], "not a share of the experts"),
        (["--text", "nowhere.txt"], "no file or folder nowhere"),
        (["--facts", "nowhere.jsonl"], "cannot be read"),
        (["--questions", "some"], "not a whole number"),
        (["--questions", "0", "--tokens", "0"], "at least one question"),
        (["--csv", "no/where.csv"], "no folder"),
        (["--predictors", "luck"], "no predictor called 'luck'"),
    ],
)
def test_errors_in_the_users_words(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):  # of argparse, or of ours
        raise SystemExit(cli.main(["eval", *words]))
    assert why in capsys.readouterr().err
