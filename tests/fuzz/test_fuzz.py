"""Whatever is damaged, mangled or made up: it is refused in clear words, or used as the file itself says.

A mutant of each kind, and of those that were found to go wrong one for each file in which they did; with `--all` every
one that ever was, the page's and a thousand more.

First the fuzzer itself: the same seed is the same mutant, and defects planted in a reader are seen, kept and replayed.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fuzz.changes import apply
from tests.fuzz.gguf_fields import read_fields, unsound
from tests.fuzz.gguf_file import FILE as GGUF
from tests.fuzz.gguf_file import GgufFiles
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutant import Mutant
from tests.fuzz.oracle import unclear
from tests.fuzz.runner import HANG_S, Asked, cores, each, run_all
from tests.fuzz.session import go_through, kept
from tests.selection import layered

SECONDS = 1.5  # until a planted hang is called one
EXPECTED = {
    "0": "explained",
    "1": "clear error",
    "2": "unclear error",
    "3": "exception",
    "4": "hang",
    "5": "crash",
    "6": "exception",
    "7": "same",
}


@pytest.mark.long(0.1)
def test_planted_defects_are_found_kept_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = go_through(one_of_each(), 2, SECONDS, folder=tmp_path)
    assert counts == Counter(("planted", outcome) for outcome in EXPECTED.values())
    assert "planted.py" in capsys.readouterr().out
    files = kept(tmp_path)
    assert len(files) == 5 and all(path.stat().st_size < 1000 for path, _ in files)
    again = {
        mutant.changes[0]["text"]: verdict.outcome
        for mutant, verdict in run_all([mutant.plain() for _, mutant in files], 2, SECONDS)
    }
    assert again == {text: outcome for text, outcome in EXPECTED.items() if text in "23456"}


def one_of_each() -> list[Asked]:
    """A mutant for each of the numbers."""
    return [
        Mutant("planted", "seven", ({"do": "text", "file": "number.txt", "text": text},)).plain() for text in EXPECTED
    ]


@pytest.mark.long(0.1)
def test_a_seed_is_one_mutant(tmp_path: Path) -> None:
    asked = [{"kind": "planted", "seed": seed} for seed in (1, 2, 3)] * 2
    drawn: dict[int | None, set[str]] = {}
    for mutant, _ in run_all(asked, 2, SECONDS):
        drawn.setdefault(mutant.seed, set()).add(json.dumps(mutant.changes))
    assert set(drawn) == {1, 2, 3} and all(len(one) == 1 for one in drawn.values())


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("The model is damaged. Download it again.", ""),
        ("", "no message"),
        ("it is damaged", "sentence"),
        ("/MODEL/x has 'int' object is not iterable.", "object"),
        ("KeyError('x').", "KeyError"),
        ("/tmp/moestro-import-x/config.json is bad.", "temporary"),
        ("Wrong: " + "x" * 3000 + ".", "characters"),
    ],
)
def test_what_a_clear_message_is(message: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    found = unclear(message, Path("/tmp/fuzz/mutants/1"))
    assert problem in found and bool(problem) == bool(found)
    assert unclear("/tmp/fuzz/mutants/1/config.json is bad.", Path("/tmp/fuzz/mutants/1")) == ""


def test_json_changes_do_what_they_say(tmp_path: Path) -> None:
    file = tmp_path / "x.json"

    def after(*changes: dict[str, object]) -> str:
        file.write_text('{"a": {"b": 1, "c": 2}}')
        apply([{"file": "x.json", **change} for change in changes], tmp_path)
        return file.read_text()

    at = ["a", "b"]
    assert after({"do": "set", "at": at, "raw": "NaN"}) == '{"a": {"b": NaN, "c": 2}}'
    assert after({"do": "double", "at": at, "raw": "3"}) == '{"a": {"b": 1, "c": 2, "b": 3}}'
    assert after({"do": "drop", "at": at}) == '{"a": {"c": 2}}'
    assert after({"do": "swap", "at": at, "with": "c"}) == '{"a": {"b": 2, "c": 1}}'
    assert after({"do": "set", "at": at, "depth": 3}) == '{"a": {"b": [[[]]], "c": 2}}'
    assert after({"do": "drop", "at": ["a"]}, {"do": "drop", "at": at}) == "{}"  # what is gone is left


def test_a_gguf_file_is_judged_by_the_formats_rules(tmp_path: Path) -> None:
    kind = GgufFiles()
    kind.make("qwen3_moe", tmp_path)
    whole = (tmp_path / GGUF).read_bytes()
    assert unsound(tmp_path / GGUF) == ""
    fields = read_fields(whole)
    for name, value in (
        ("tensor.1.offset", fields.places["tensor.1.offset"].value + 32),
        ("tensor.0.type", 99),
        ("tensor.0.side.0", 0),
        ("tensors", 2**40),
        ("version", 7),
    ):
        (tmp_path / GGUF).write_bytes(whole)
        apply([{"do": "field", "file": GGUF, "field": name, "value": value}], tmp_path)
        assert unsound(tmp_path / GGUF), name


MANY = 1000
FEW: dict[str, tuple[int, ...]] = {  # a seed that was well when it was chosen
    "checkpoint": (6,),
    "pack": (19,),
    "store": (2,),
}
USUAL = (0,)


def wrong(asked: Iterable[Asked], workers: int) -> tuple[list[str], int]:
    """What did not come out well, and how many there were."""
    found, count = [], 0
    for mutant, verdict in run_all(asked, workers):
        count += 1
        if not verdict.good:
            found.append(
                "\n  ".join((verdict.outcome, json.dumps({"mutant": mutant.plain()}), verdict.detail, verdict.where))
            )
    return found, count


def representative(files: list[tuple[Path, Mutant]]) -> list[Mutant]:
    """One of each kind and file of code in which it went wrong."""
    first: dict[tuple[str, str], Mutant] = {}
    for path, mutant in files:
        where = str(json.loads(path.read_text(encoding="utf-8"))["found"]["where"])
        first.setdefault((mutant.kind, where.partition(":")[0]), mutant)
    return list(first.values())


FILES = [kind for kind in KINDS if kind != "page"]


@pytest.mark.long(0.5)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kinds", "every"),  # what builds the page takes as long to start as all others to run
    layered([(FILES, False), (FILES, True), (["page"], True)], quick=lambda case: case == (FILES, False)),
    ids=["one a cause", "files and requests", "page"],
)
def test_a_mutant_of_every_kind_and_what_ever_went_wrong(kinds: list[str], every: bool) -> None:
    few: list[Asked] = [{"kind": kind, "seed": seed} for kind in kinds for seed in FEW.get(kind, USUAL)]
    files = [one for one in kept() if one[1].kind in kinds]
    mutants = [mutant for _, mutant in files] if every else representative(files)
    assert {mutant.kind for mutant in mutants} == {*kinds}
    seeds = [mutant.plain() for mutant in mutants]
    found, count = wrong(sorted([*few, *seeds], key=lambda one: str(one["kind"])), 1)
    assert not found, "\n".join(found)
    assert count == len(few) + len(seeds)


@pytest.mark.long(2)
@pytest.mark.timeout(60 + 2 * MANY * int(HANG_S) // 10)
def test_a_thousand_mutants() -> None:
    found, count = wrong(each(KINDS, range(10_000, 10_000 + MANY)), min(2, cores()))
    assert not found, "\n".join(found)
    assert count == MANY
