"""The prefetches of the cache: issued by priority, cancelled while queued, finally counted as used, late or wasted.

Part of the cache: only `core.cache.expert_cache`, which owns the slot map, calls this, on the compute thread.
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
    """The interface to the expert cache."""

    experts: int
    counts: Counts

    @property
    def transfers(self) -> Link: ...
    def is_resident(self, eid: int) -> bool: ...
    def pool(self, layer: int) -> Pool: ...
    def evict(self, pool: Pool, eid: int) -> None: ...


class PrefetchQueue:
    """`fresh`: eid -> copy of each prefetch whose layer was not reached since. `lost`: eids evicted for a wasted
    prefetch."""

    def __init__(self, cache: Cache, layers: int) -> None:
        self._cache = cache
        self.schedule = Schedule(layers, cache.experts)
        self.fresh: dict[int, Ticket] = {}
        self.lost: set[int] = set()

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """Count prefetches for `layer` that are not `wanted` as wasted; those still queued are cancelled and lose their
        slot."""
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
        """Rank `guesses` of layer `at` with the queued prefetches, and call `fetch(eid, its pool, all predicted)` by
        priority.

        `fetch` returns the copy to queue, or None where nothing worse than the prediction may be evicted; then the
        queued prefetch of the lowest priority is cancelled if it ranks lower, and `fetch` is called again.
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
        """Settle an unused prefetch: cancelled while it is queued, counted as wasted once it has used the link."""
        ticket, cache = self.fresh.pop(eid), self._cache
        if cache.transfers.cancel(ticket):
            cache.counts.issued -= 1
            return
        cache.counts.waste(ticket.bytes, evicted=evicted)
        if ticket.displaced >= 0 and not cache.is_resident(ticket.displaced):
            self.lost.add(ticket.displaced)

    def demanded(self, eid: int, ticket: Ticket) -> None:
        """`eid` was missing: attribute its copy to prefetching if it was evicted for a wasted prefetch."""
        if eid in self.lost:
            self.lost.remove(eid)
            self._cache.counts.lost.append(ticket)

    def take_back(self, ticket: Ticket) -> bool:
        """Cancel a queued prefetch and free its slot; False when its copy has started."""
        if not self._cache.transfers.cancel(ticket):
            return False
        self._cache.evict(self._cache.pool(ticket.eid // self._cache.experts), ticket.eid)
        return True

    def _outranks(self, priority: float, pool: Pool) -> bool:
        """Cancel the queued prefetch with the lowest priority in the pool, if that is below `priority`; False if there
        is none."""
        inside = range(pool.part.start, pool.part.stop)
        lower = [t for eid, t in self.fresh.items() if t.state == QUEUED and t.priority < priority and eid in inside]
        return any(self.take_back(ticket) for ticket in sorted(lower, key=lambda t: (t.priority, -t.number)))
