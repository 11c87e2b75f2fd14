"""What is fetched before it is asked for: issued by priority, taken back while it is queued, counted in the end.

Part of the cache: `core.cache.expert_cache` owns the map and is the only one to call this, on the thread that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.cache.lease import Counts
from core.cache.pool import Pool, fitting
from core.cache.prefetch_priority import Schedule
from core.memory.ticket import QUEUED, Link, Ticket
from core.policy.predict import Guess


class Cache(Protocol):
    """What this asks of the residency."""

    experts: int
    counts: Counts

    @property
    def transfers(self) -> Link: ...
    def is_resident(self, eid: int) -> bool: ...
    def pool(self, layer: int) -> Pool: ...
    def evict(self, pool: Pool, eid: int) -> None: ...


class PrefetchQueue:
    """`fresh`: eid -> the copy of what was prefetched and whose layer was not reached since. `lost`: experts that left
    for a prefetch which came to nothing."""

    def __init__(self, cache: Cache, layers: int) -> None:
        self._cache = cache
        self.schedule = Schedule(layers, cache.experts)
        self.fresh: dict[int, Ticket] = {}
        self.lost: set[int] = set()

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """What was prefetched for `layer` and is not `wanted` was in vain; what is still queued goes with its slot."""
        experts = self._cache.experts
        low, high = layer * experts, (layer + 1) * experts
        for eid in [e for e in self.fresh if low <= e < high and e - low not in wanted]:
            if not self.take_back(self.fresh[eid]):
                self.waste(eid, evicted=False)

    def issue(
        self,
        guesses: Sequence[Guess],
        at: int,
        phase: str,
        pools: Sequence[Pool],
        size_bytes: int,
        fetch: Callable[[int, Pool, dict[int, Pool]], Ticket | None],
    ) -> None:
        """Rank `guesses` of layer `at` with what is queued, and `fetch(eid, its pool, all that are named)` by priority.

        `fetch` gives the copy that is about to be queued, or None where nothing worse than a guess may leave; then
        the queued prefetch of the lowest priority leaves if it is lower, and `fetch` is asked again.
        """
        cache, experts, is_resident = self._cache, self._cache.experts, self._cache.is_resident
        link = cache.transfers
        if at >= 0 and self.schedule.deadline:
            self.schedule.rhythm.note(phase, at, link.now_s())
        queued = [ticket for ticket in self.fresh.values() if ticket.state == QUEUED] if self.fresh else []
        if not queued and all(is_resident(layer * experts + expert) for layer, expert, _ in guesses):
            return
        best = self.schedule.sort(guesses, at)
        named = fitting(best, pools, experts)
        ranked = self.schedule.rank(
            [g for g in best if g.layer * experts + g.expert in named],
            at,
            queued,
            lambda eid: not is_resident(eid),
            link,
            size_bytes,
        )
        for ticket in ranked.drop:
            self.take_back(ticket)
        if ranked.priorities:
            link.rank(ranked.priorities)
        for eid, score, priority in ranked.issue:
            pool = named[eid]
            copy = fetch(eid, pool, named)
            if copy is None and self._outranks(priority, pool):
                copy = fetch(eid, pool, named)
            if copy is not None:
                copy.score, copy.priority = score, priority
                self.fresh[eid] = copy
                self.lost.discard(eid)
                cache.counts.issued += 1
                link.submit(copy)

    def waste(self, eid: int, *, evicted: bool) -> None:
        """What was prefetched for nothing: taken back while it is queued, counted once it has used the link."""
        ticket, cache = self.fresh.pop(eid), self._cache
        if cache.transfers.cancel(ticket):
            cache.counts.issued -= 1
            return
        cache.counts.waste(ticket.bytes, evicted=evicted)
        if ticket.displaced >= 0 and not cache.is_resident(ticket.displaced):
            self.lost.add(ticket.displaced)

    def demanded(self, eid: int, ticket: Ticket) -> None:
        """`eid` was missing: a prefetch is to blame for it if it had made it leave and came to nothing itself."""
        if eid in self.lost:
            self.lost.remove(eid)
            self._cache.counts.lost.append(ticket)

    def take_back(self, ticket: Ticket) -> bool:
        """A queued prefetch leaves the queue and its slot; False when it has started."""
        if not self._cache.transfers.cancel(ticket):
            return False
        self._cache.evict(self._cache.pool(ticket.eid // self._cache.experts), ticket.eid)
        return True

    def _outranks(self, priority: float, pool: Pool) -> bool:
        """Make a slot free of the queued prefetch with the lowest priority of the pool, if that is lower."""
        inside = range(pool.part.start, pool.part.stop)
        lower = [t for eid, t in self.fresh.items() if t.state == QUEUED and t.priority < priority and eid in inside]
        return any(self.take_back(ticket) for ticket in sorted(lower, key=lambda t: (t.priority, -t.number)))
