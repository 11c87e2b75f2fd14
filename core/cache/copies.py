"""The memory below the cache, and the unfinished copies of experts into slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from core.cache.counts import Counts
from core.cache.hits import Hits
from core.memory.slot import Slot
from core.memory.ticket import QUEUED, Link, Ticket
from core.policy.eviction import MakePolicy
from core.types import Origin, Outcome, Segment

LAST = -1.0  # the priority of a copy behind every prefetch's


class SlotArena(Protocol):
    """Allocates slots: `core.memory.arena.Arena`, or a simulated one."""

    def expect(self, count: int, by_layer: bool = False) -> bool: ...
    def allocate(self, layer: int = -1) -> Slot: ...
    def fits(self, slot: Slot, layer: int) -> bool: ...
    def fit(self, slot: Slot, layer: int) -> None: ...
    def free(self, slot: Slot) -> None: ...
    def pack(self, settle: Callable[[], None]) -> None: ...
    def __len__(self) -> int: ...


class ExpertSource(Protocol):
    """Has all experts in host memory or on disk: `core.memory.store.ExpertStore`, or a simulated one."""

    @property
    def blob_bytes(self) -> int: ...
    def bytes_of(self, eid: int) -> int: ...
    def use_policy(self, make_policy: MakePolicy, usual: npt.ArrayLike) -> None: ...
    def begin_pass(self, now: int) -> None: ...
    def origin(self, eid: int) -> Origin: ...
    def host_resident(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Where slots are allocated, where experts are copied from, and what copies them."""

    arena: SlotArena
    store: ExpertSource
    link: Link


class Copies:
    """`whole`: eid -> all of its blocks. `tickets`: eid -> its copy, until it is known to have landed; `behind`: those
    of experts that the host computed, and that are copied for later. `phase`: of the pass, noted in every ticket."""

    def __init__(self, link: Link, store: ExpertSource, whole: Sequence[Segment], phase: str = "prefill") -> None:
        self.link, self.store, self.whole, self.phase = link, store, whole, phase
        self.tickets: dict[int, Ticket] = {}
        self.behind: dict[int, Ticket] = {}
        self.fence: Any = None  # CUDA event: until then any slot may be read, whoever has it now; None = by nobody
        self.hits = Hits(len(whole))
        self.counts = Counts()

    def over_same_link(self) -> Copies:
        """Copies of the same experts over the same link, counted apart."""
        return Copies(self.link, self.store, self.whole, self.phase)

    @property
    def expert_bytes(self) -> int:
        """Bytes copied to fetch all blocks of an expert, on average over layers."""
        return self.store.blob_bytes

    def prepare(self, segment: Segment, slots: Sequence[Slot], *, demand: bool) -> Ticket:
        """A copy of a segment into its new slots, one per block, not yet submitted."""
        size = self.store.bytes_of(segment.eid) * len(segment.blocks) // len(self.whole[segment.eid].blocks)
        for slot in slots if self.fence is not None else ():
            slot.fence = self.fence
        self.tickets[segment.eid] = ticket = Ticket(segment, slots, size, demand, self.phase)
        return ticket

    def demand(self, segment: Segment, slots: Sequence[Slot], *, waited: bool = False) -> Ticket:
        """Submit a copy that is needed at once. `waited`: it comes from host memory, and the caller waits for it
        next."""
        ticket = self.prepare(segment, slots, demand=True)
        ticket.waited = waited
        return self.link.submit(ticket)

    def admit(self, segment: Segment, slots: Sequence[Slot]) -> None:
        """Submit a copy that nothing waits for: it begins when no demand is queued or in flight, and no prefetch is
        queued."""
        ticket = self.prepare(segment, slots, demand=False)
        ticket.behind, ticket.priority = True, LAST
        self.behind[segment.eid] = ticket
        self.counts.host_admitted += 1
        self.counts.admitted_bytes += ticket.bytes
        self.link.submit(ticket)

    def is_behind(self, eid: int) -> bool:
        """Whether its copy is one of those, has not landed, and has not failed."""
        ticket = self.behind.get(eid)
        if ticket is None:
            return False
        if self.tickets.get(eid) is ticket and ticket.error is None and self.pending(eid) is not None:
            return True
        del self.behind[eid]
        return False

    def behind_now(self) -> int:
        """How many of them there are."""
        return sum([self.is_behind(eid) for eid in [*self.behind]])

    def miss(self, eid: int) -> Outcome:
        """The outcome of a request that has to fetch `eid`, by where the expert is now."""
        return Outcome.MISS_DISK if self.store.origin(eid) == "disk" else Outcome.MISS

    def pending(self, eid: int) -> Ticket | None:
        """The copy of `eid` if it has not landed; otherwise it is forgotten."""
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
        """`eid` loses slots: cancel its copy, or wait until nothing writes into them any more."""
        self.hits.drop(eid)
        if (ticket := self.tickets.pop(eid, None)) is not None and not self.link.cancel(ticket):
            self.link.settle(ticket)

    def failed(self) -> list[int]:
        """Experts whose copy ended with an error."""
        return [eid for eid, ticket in self.tickets.items() if ticket.error is not None]

    def in_flight(self) -> set[int]:
        """Experts with a copy that has not landed. Safe to call from any thread."""
        return {eid for eid, ticket in self.tickets.copy().items() if not self.link.landed(ticket)}

    def settle(self) -> None:
        """Return when no copy thread writes into a slot any more, nor will."""
        for ticket in self.tickets.values():
            self.link.settle(ticket)

    def quiet(self) -> bool:
        """Whether no copy is queued or in flight. Who asks may wait for all of them, so that none is left to who waits
        for one."""
        found = all(ticket.error is not None or self.link.landed(ticket) for ticket in self.tickets.values())
        if not found:
            self.link.wake()
        return found

    def take_counts(self) -> Counts:
        """Return the counts since the last call and reset them."""
        counts, self.counts = self.counts, Counts()
        return counts
