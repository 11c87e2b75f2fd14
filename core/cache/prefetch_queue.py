"""The prefetches of the cache: issued by priority, cancelled while queued, finally counted as used, late or wasted.

A prefetch goes into one of two destinations: into the cache, where it evicts an expert that is less likely to be
needed, or into a separate buffer, where it evicts none. Experts in several blocks are always prefetched into the buffer
(MoEpic section 3.2): of each the blocks that the cache lacks, best predictions first, until the routing of the layer is
known or the buffer is full. Part of `core.cache.expert_cache`, on the compute thread.
"""

from collections import deque
from collections.abc import Collection, Sequence

from core.cache.copies import Copies
from core.cache.core import CacheCore
from core.cache.pool import Pool, fitting
from core.cache.prefetch_priority import Planned, QueueChanges, Schedule
from core.memory.slot import Slot
from core.memory.ticket import QUEUED, STARTED, Ticket
from core.policy.predict import LayerMap, Prediction
from core.policy.predict.base import PriorityFormula, by_score
from core.policy.prefetch.guard import PrefetchGuard
from core.settings.prefetch import PrefetchSettings
from core.types import Segment


class PrefetchQueue:
    """`fresh`: eid -> copy of each prefetch whose layer was not reached since. `lost`: experts evicted for a wasted
    prefetch, none of them with the destination `to_buffer`."""

    def __init__(self, core: CacheCore[Slot], copies: Copies, *, to_buffer: bool) -> None:
        self._core, self._copies, self.to_buffer = core, copies, to_buffer
        self.schedule = Schedule(core.layers, core.experts)
        self.guard = PrefetchGuard(core.layers * core.experts)
        self.fresh: dict[int, Ticket] = {}
        self.lost: set[int] = set()
        self._waiting: deque[Planned] = deque()  # for room in the buffer, best first
        self._for_draft = False  # what is fetched now
        self._unwanted: set[int] = set()  # in the buffer and not requested; their copies have started

    def configure(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Other rules for what is fetched, between two passes."""
        self.schedule.configure(old, new)
        self.guard.configure(old, new)

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """The routing of `layer` is known. Prefetches for it that are not `wanted` are cancelled and lose their slots
        while queued, and count as wasted afterwards; in the buffer they lose their slots once the copy has ended."""
        core, low = self._core, layer * self._core.experts
        inside = range(low, low + core.experts)
        for eid in [eid for eid in self.fresh if eid in inside and eid - low not in wanted]:
            if not self.cancel(self.fresh[eid]):
                self.waste(eid, evicted=False)
                if self.to_buffer:
                    self._unwanted.add(eid)
        if self.to_buffer:
            self._waiting = deque(one for one in self._waiting if one.eid not in inside)
            self._sweep()
            core.arrive(layer, [*(low + expert for expert in wanted), *self._unwanted])

    def issue(
        self,
        predictions: Sequence[Prediction],
        at: int,
        maps: Sequence[LayerMap] = (),
        priority: PriorityFormula = by_score,
        for_draft: bool = False,
    ) -> None:
        """Rank `predictions` of layer `at` (-1: before the first) with the queued prefetches, and fetch by `priority`
        while there are slots. `maps` go to the eviction policy, too. `for_draft`: who predicts is what guesses tokens.

        Into the cache: where only better experts could be evicted, the queued prefetch of the lowest priority is
        cancelled if it ranks lower. Into the buffer: these predictions replace those for the same layers that still
        wait for room.
        """
        core, copies, schedule = self._core, self._copies, self.schedule
        schedule.use(priority, maps)
        self._for_draft = for_draft
        if core.uses_hints:
            for one in maps:
                core.hints.tell(*one)
            core.hints.name(predictions)
        if at >= 0 and (schedule.deadline or self.to_buffer):
            schedule.rhythm.note(copies.phase, at, copies.link.now_s())
        queued = [ticket for ticket in self.fresh.values() if ticket.state == QUEUED] if self.fresh else []
        if self.to_buffer:
            gone = {at, *(prediction.layer for prediction in predictions)}  # layers that nothing waits for any more
            waiting = [Prediction(*divmod(eid, core.experts), score) for eid, score, _ in self._waiting]
            wanted = [*predictions, *(one for one in waiting if one.layer not in gone)]
            changes = schedule.plan_buffer(wanted, at, queued, self._lacking_share, copies.link, copies.expert_bytes)
            self._apply(changes)
            self._waiting = deque(changes.issue)
            self.fill()
        elif queued or not all(core.is_resident(layer * core.experts + expert) for layer, expert, _ in predictions):
            self._issue_by_eviction(schedule.sort(predictions, at), at, queued)

    def fill(self) -> None:
        """Fetch the waiting prefetches into the buffer, best first, as long as it has room."""
        self._sweep()
        core = self._core
        while self._waiting:
            planned = self._waiting[0]
            if self._lacking_share(planned.eid):
                lacking, slots = core.held.lacking(planned.eid), core.buffer(planned.eid)
                if slots is None:
                    return
                self._submit(planned, lacking, slots)
            self._waiting.popleft()

    def waste(self, eid: int, *, evicted: bool) -> None:
        """Settle an unused prefetch: cancelled while it is queued, counted as wasted once it has used the link."""
        ticket, copies = self.fresh.pop(eid), self._copies
        if copies.link.cancel(ticket):
            copies.counts.issued(ticket, -1)
            return
        copies.counts.waste(ticket, evicted=evicted)
        if ticket.displaced >= 0 and not self._core.is_resident(ticket.displaced):
            self.lost.add(ticket.displaced)

    def blame(self, eid: int, ticket: Ticket) -> None:
        """An expert that is `lost` was missing: its copy is a cost of prefetching."""
        self.lost.remove(eid)
        self._copies.counts.lost.append(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a queued prefetch and free its slots; False when its copy has started."""
        if not self._copies.link.cancel(ticket):
            return False
        core = self._core
        (core.drop if ticket.eid in core.held.buffered else core.evict)(ticket.eid)
        return True

    def end(self) -> None:
        """End every prefetch, between two passes: another queue takes this one's place."""
        for eid, ticket in [*self.fresh.items()]:
            if not self.cancel(ticket):
                self.waste(eid, evicted=False)
        self._core.empty_buffer()

    def _issue_by_eviction(self, best: Sequence[Prediction], at: int, queued: Sequence[Ticket]) -> None:
        core, copies, experts = self._core, self._copies, self._core.experts
        named = fitting(best, [pool.capacity // core.blocks for pool in core.pools], experts)
        fits = [prediction for prediction in best if prediction.layer * experts + prediction.expert in named]
        changes = self.schedule.rank(
            fits, at, queued, lambda eid: not core.is_resident(eid), copies.link, copies.expert_bytes
        )
        self._apply(changes)
        if changes.issue:  # a wasted prefetch that has landed may be evicted
            for eid in [eid for eid in copies.tickets if eid not in self.fresh]:
                copies.pending(eid)
        for planned in changes.issue:
            slots = self._evict_for(planned, named)
            if slots is None and self._outranks(planned.priority, core.pool(planned.eid // experts)):
                slots = self._evict_for(planned, named)
            if slots is not None:
                self._submit(planned, copies.whole[planned.eid], slots, core.displaced)

    def _apply(self, changes: QueueChanges) -> None:
        for ticket in changes.drop:
            self.cancel(ticket)
        if changes.priorities:
            self._copies.link.rank(changes.priorities)

    def _submit(self, planned: Planned, segment: Segment, slots: Sequence[Slot], displaced: int = -1) -> None:
        copies = self._copies
        ticket = copies.prepare(segment, slots, demand=False)
        ticket.displaced, ticket.score, ticket.priority = displaced, planned.score, planned.priority
        ticket.for_draft = self._for_draft
        self.fresh[planned.eid] = ticket
        self.lost.discard(planned.eid)
        copies.counts.issued(ticket)
        copies.link.submit(ticket)

    def _evict_for(self, planned: Planned, named: Collection[int]) -> tuple[Slot, ...] | None:
        """Slots in the cache for a prefetch; None when only better experts could be evicted. An expert that the policy
        does not retain after its use is worth nothing."""
        core = self._core

        def may_displace(gone: int) -> bool:
            return not core.retains or self.guard.may_displace(planned.score, gone)

        return core.admit(
            planned.eid, core.leased, named, self.fresh, self._copies.tickets, core.pinned, may_displace=may_displace
        )

    def _outranks(self, priority: float, pool: Pool[Slot]) -> bool:
        """Cancel the queued prefetch with the lowest priority in the pool, if that is below `priority`; False if there
        is none."""
        inside = pool.eids
        lower = [t for eid, t in self.fresh.items() if t.state == QUEUED and t.priority < priority and eid in inside]
        return any(self.cancel(ticket) for ticket in sorted(lower, key=lambda t: (t.priority, -t.number)))

    def _lacking_share(self, eid: int) -> float:
        """The share of an expert's blocks that a prefetch would fetch; 0 while a lease holds it."""
        core = self._core
        return 0.0 if eid in core.leased else 1 - len(core.table[eid]) / core.blocks

    def _sweep(self) -> None:
        """Unwanted prefetches in the buffer lose their slots where the copy has ended."""
        buffered, tickets = self._core.held.buffered, self._copies.tickets
        for eid in [eid for eid in self._unwanted if eid not in tickets or tickets[eid].state != STARTED]:
            self._unwanted.discard(eid)
            if eid in buffered and eid not in self.fresh:
                self._core.drop(eid)
