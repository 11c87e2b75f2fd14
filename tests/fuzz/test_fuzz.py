"""Whatever is damaged, mangled or made up: it is refused in clear words, or used as the file itself says.

A mutant of each kind, and of those that were found to go wrong one for each file in which they did; with `--all` every
one that ever was, the page's and a thousand more.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS
from tests.fuzz.mutant import Mutant
from tests.fuzz.runner import HANG_S, Asked, cores, each, run_all
from tests.fuzz.session import kept
from tests.selection import layered

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
