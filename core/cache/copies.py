"""The copies of experts into slots that are not finished, and the counts of what was copied."""

from __future__ import annotations

from typing import Protocol

import numpy.typing as npt

from core.cache.lease import Counts
from core.memory.slot import Slot
from core.memory.ticket import QUEUED, Link, Ticket
from core.policy.eviction import MakePolicy
from core.types import Origin, Outcome


class Experts(Protocol):
    """The interface to a store: `core.memory.store.ExpertStore`, or a simulated one."""

    @property
    def blob_bytes(self) -> int: ...
    def use_policy(self, make_policy: MakePolicy, usual: npt.ArrayLike) -> None: ...
    def begin_pass(self, now: int) -> None: ...
    def origin(self, eid: int) -> Origin: ...


class Copies:
    """`tickets`: eid -> its copy, until it is known to have landed. `phase`: of the pass, noted in every ticket."""

    def __init__(self, link: Link, store: Experts, phase: str = "prefill") -> None:
        self.link, self.store, self.phase = link, store, phase
        self.tickets: dict[int, Ticket] = {}
        self.counts = Counts()

    def prepare(self, eid: int, slot: Slot, *, demand: bool) -> Ticket:
        """A copy of `eid` into its new slot, not yet submitted."""
        self.tickets[eid] = ticket = Ticket(eid, slot, self.store.blob_bytes, demand, self.phase)
        return ticket

    def demand(self, eid: int, slot: Slot) -> Ticket:
        """Submit a copy that is needed at once."""
        return self.link.submit(self.prepare(eid, slot, demand=True))

    def miss(self, eid: int) -> Outcome:
        """The outcome of a request that must fetch `eid`, by where the expert is now."""
        return Outcome.MISS_DISK if self.store.origin(eid) == "disk" else Outcome.MISS

    def pending(self, eid: int) -> Ticket | None:
        """The copy of `eid` if it is not over; one that landed is forgotten."""
        ticket = self.tickets.get(eid)
        if ticket is not None and self.link.landed(ticket):
            del self.tickets[eid]
            return None
        return ticket

    def is_queued(self, eid: int) -> bool:
        """Whether its copy has not started."""
        ticket = self.tickets.get(eid)
        return ticket is not None and ticket.state == QUEUED

    def wait(self, eid: int) -> None:
        """Wait for the copy of `eid`, if there is one."""
        if eid in self.tickets:
            self.link.wait(self.tickets[eid])
            del self.tickets[eid]

    def drop(self, eid: int) -> None:
        """`eid` loses its slot: cancel its copy, or wait until nothing writes into the slot any more."""
        if (ticket := self.tickets.pop(eid, None)) is not None and not self.link.cancel(ticket):
            self.link.settle(ticket)

    def failed(self) -> list[int]:
        """Experts whose copy ended with an error."""
        return [eid for eid, ticket in self.tickets.items() if ticket.error is not None]

    def flying(self) -> set[int]:
        """Experts with a copy that has not landed. Safe to call from any thread."""
        return {eid for eid, ticket in self.tickets.copy().items() if not self.link.landed(ticket)}

    def quiet(self) -> bool:
        """Whether no copy is queued or under way."""
        return all(ticket.error is not None or self.link.landed(ticket) for ticket in self.tickets.values())

    def take_counts(self) -> Counts:
        """Return the counts since the last call and reset them."""
        counts, self.counts = self.counts, Counts()
        return counts
