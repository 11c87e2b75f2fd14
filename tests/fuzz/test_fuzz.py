"""Whatever is damaged, mangled or made up: it is refused in clear words, or used as the file itself says.

A mutant of each kind, and every one that was ever found to go wrong; with `--all` the page's and a thousand more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from tests.fuzz.kinds import KINDS
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kinds",  # what builds the page takes as long to start as all others to run
    layered([[kind for kind in KINDS if kind != "page"], ["page"]], quick=lambda kinds: "page" not in kinds),
    ids=["files and requests", "page"],
)
def test_a_mutant_of_every_kind_and_all_that_ever_went_wrong(kinds: list[str]) -> None:
    few: list[Asked] = [{"kind": kind, "seed": seed} for kind in kinds for seed in FEW.get(kind, USUAL)]
    seeds = [mutant.plain() for _, mutant in kept() if mutant.kind in kinds]
    found, count = wrong(sorted([*few, *seeds], key=lambda one: str(one["kind"])), 1)
    assert not found, "\n".join(found)
    assert count == len(few) + len(seeds)


@pytest.mark.long(2)
@pytest.mark.timeout(60 + 2 * MANY * int(HANG_S) // 10)
def test_a_thousand_mutants() -> None:
    found, count = wrong(each(KINDS, range(10_000, 10_000 + MANY)), min(2, cores()))
    assert not found, "\n".join(found)
    assert count == MANY
