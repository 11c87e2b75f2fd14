"""The prefetches of the cache: issued by priority, cancelled while queued, finally counted as used, late or wasted.

Part of `core.cache.expert_cache`, on the compute thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from core.cache.copies import Copies
from core.cache.core import CacheCore
from core.cache.pool import Pool, fitting
from core.cache.prefetch_priority import Schedule
from core.memory.slot import Slot
from core.memory.ticket import QUEUED, Ticket
from core.policy.predict import LayerMap, Prediction
from core.policy.prefetch.guard import PrefetchGuard
from core.settings.prefetch import PrefetchSettings


class PrefetchQueue:
    """`fresh`: eid -> copy of each prefetch whose layer was not reached since. `lost`: eids evicted for a wasted
    prefetch."""

    def __init__(self, core: CacheCore[Slot], copies: Copies) -> None:
        self._core, self._copies = core, copies
        self.schedule = Schedule(core.layers, core.experts)
        self.guard = PrefetchGuard(core.layers * core.experts)
        self.fresh: dict[int, Ticket] = {}
        self.lost: set[int] = set()

    def configure(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Other rules for what is fetched, between two passes."""
        self.schedule.configure(old, new)
        self.guard.configure(old, new)

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """Count prefetches for `layer` that are not `wanted` as wasted; those still queued are cancelled and lose their
        slot."""
        experts = self._core.experts
        low, high = layer * experts, (layer + 1) * experts
        for eid in [e for e in self.fresh if low <= e < high and e - low not in wanted]:
            if not self.take_back(self.fresh[eid]):
                self.waste(eid, evicted=False)

    def issue(self, predictions: Sequence[Prediction], at: int, maps: Sequence[LayerMap] = ()) -> None:
        """Rank `predictions` of layer `at` with the queued prefetches, and fetch by priority while there is a slot.

        Where only better experts could be evicted, the queued prefetch of the lowest priority is cancelled if it ranks
        lower. `maps` are told to the eviction policy.
        """
        core, copies, experts = self._core, self._copies, self._core.experts
        if core.uses_hints:
            for one in maps:
                core.hints.tell(*one)
            core.hints.name(predictions)
        if at >= 0 and self.schedule.deadline:
            self.schedule.rhythm.note(copies.phase, at, copies.link.now_s())
        queued = [ticket for ticket in self.fresh.values() if ticket.state == QUEUED] if self.fresh else []
        if not queued and all(core.is_resident(layer * experts + expert) for layer, expert, _ in predictions):
            return
        best = self.schedule.sort(predictions, at)
        named = fitting(best, [pool.capacity // core.blocks for pool in core.pools], experts)
        ranked = self.schedule.rank(
            [p for p in best if p.layer * experts + p.expert in named],
            at,
            queued,
            lambda eid: not core.is_resident(eid),
            copies.link,
            copies.expert_bytes,
        )
        for ticket in ranked.drop:
            self.take_back(ticket)
        if ranked.priorities:
            copies.link.rank(ranked.priorities)
        if ranked.issue:  # what was prefetched in vain and has landed may give up its slot
            for eid in [eid for eid in copies.tickets if eid not in self.fresh]:
                copies.pending(eid)
        for eid, score, priority in ranked.issue:
            copy = self._fetch(eid, score, named)
            if copy is None and self._outranks(priority, core.pool(eid // experts)):
                copy = self._fetch(eid, score, named)
            if copy is not None:
                copy.score, copy.priority = score, priority
                self.fresh[eid] = copy
                self.lost.discard(eid)
                copies.counts.prefetch_issued += 1
                copies.link.submit(copy)

    def waste(self, eid: int, *, evicted: bool) -> None:
        """Settle an unused prefetch: cancelled while it is queued, counted as wasted once it has used the link."""
        ticket, copies = self.fresh.pop(eid), self._copies
        if copies.link.cancel(ticket):
            copies.counts.prefetch_issued -= 1
            return
        copies.counts.waste(ticket.bytes, evicted=evicted)
        if ticket.displaced >= 0 and not self._core.is_resident(ticket.displaced):
            self.lost.add(ticket.displaced)

    def demanded(self, eid: int, ticket: Ticket) -> None:
        """`eid` was missing: attribute its copy to prefetching if it was evicted for a wasted prefetch."""
        if eid in self.lost:
            self.lost.remove(eid)
            self._copies.counts.lost.append(ticket)

    def take_back(self, ticket: Ticket) -> bool:
        """Cancel a queued prefetch and free its slot; False when its copy has started."""
        if not self._copies.link.cancel(ticket):
            return False
        self._core.evict(ticket.eid)
        return True

    def _fetch(self, eid: int, score: float, named: Collection[int]) -> Ticket | None:
        """Assign slots for a prefetch that is needed with probability `score`; None when only better experts could be
        evicted. What the eviction policy does not retain after its use is worth nothing."""
        core, copies = self._core, self._copies

        def may_displace(gone: int) -> bool:
            return not core.retains or self.guard.may_displace(score, gone)

        slots = core.admit(eid, core.leased, named, self.fresh, copies.tickets, core.pinned, may_displace=may_displace)
        if slots is None:
            return None
        ticket = copies.prepare(copies.whole[eid], slots, demand=False)
        ticket.displaced = core.displaced
        return ticket

    def _outranks(self, priority: float, pool: Pool[Slot]) -> bool:
        """Cancel the queued prefetch with the lowest priority in the pool, if that is below `priority`; False if there
        is none."""
        inside = pool.eids
        lower = [t for eid, t in self.fresh.items() if t.state == QUEUED and t.priority < priority and eid in inside]
        return any(self.take_back(ticket) for ticket in sorted(lower, key=lambda t: (t.priority, -t.number)))
