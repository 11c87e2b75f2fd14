"""A few rows are computed as their experts land, those that landed together in one call."""

from types import SimpleNamespace
from typing import Any

from core.cache.lease import LeasedSegment
from core.runtime.moe_step import MoEStep
from core.runtime.program.few import FewRows, SlotsOf
from core.types import Outcome, Segment


class Transfers:
    """Waiting for a copy lands others, too."""

    def __init__(self, with_it: dict[str, list[str]]) -> None:
        self.there, self.waits, self._with_it = set[str](), list[str](), with_it

    def landed(self, ticket: str) -> bool:
        return ticket in self.there

    def wait(self, ticket: str) -> float:
        self.waits.append(ticket)
        self.there |= {ticket, *self._with_it.get(ticket, [])}
        return 0.25


def leased(expert: int, ticket: str | None, late: bool = False) -> LeasedSegment:
    outcome = Outcome.PARTIAL_HIT if late else Outcome.MISS if ticket else Outcome.HIT
    return LeasedSegment(expert, Segment(expert, range(1)), (), outcome, ticket)  # type: ignore[arg-type]


def test_what_landed_together_is_computed_together() -> None:
    step, rows, computed, waited = object.__new__(MoEStep), object.__new__(FewRows), list[list[int]](), list[bool]()
    transfers: Any = Transfers({"a": ["c"]})
    step.transfers, step.sink = transfers, SimpleNamespace(waited=lambda s, *, late: waited.append(late))  # type: ignore[assignment]
    vars(rows)["compute"] = lambda batch: computed.append([one.expert for one in batch])
    step._compute(rows, [leased(0, None), leased(1, None)])
    assert computed == [[0, 1]] and not transfers.waits
    step._compute(rows, [leased(2, "a"), leased(3, "b", late=True), leased(4, "c")])
    assert computed[1:] == [[2, 4], [3]] and transfers.waits == ["a", "b"] and waited == [False, True]


def test_an_expert_in_blocks_has_all_of_its_slots_once_the_last_one_is_there() -> None:
    def part(first: int, at: list[int]) -> Any:
        slots = [SimpleNamespace(at=one) for one in at]
        return LeasedSegment(7, Segment(7, range(first, first + len(at))), slots, Outcome.HIT, None)  # type: ignore[arg-type]

    slots = SlotsOf(3)
    assert slots.all_of(part(0, [10, 30])) == []
    assert slots.all_of(part(2, [20])) == [10, 30, 20]
    assert SlotsOf(2).all_of(part(0, [5, 6])) == [5, 6]
