"""The prefetches that go beside the cache, into a buffer, so that nobody is evicted for them: those of split experts,
and with the setting prefetch_beside of whole ones.

MoEpic section 3.2: the experts predicted for the next layer are fetched in the order of their ranking, of each the
blocks that the cache lacks, until the layer's routing is known or the buffer is full. A copy that has started is
finished. Part of `core.cache.expert_cache`, on the compute thread; takes the place of `core.cache.prefetch_queue`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from core.cache.copies import Copies
from core.cache.core import CacheCore
from core.cache.prefetch_priority import Schedule
from core.memory.slot import Slot
from core.memory.ticket import QUEUED, STARTED, Ticket
from core.policy.predict import LayerMap, Prediction
from core.policy.prefetch.guard import PrefetchGuard
from core.settings.prefetch import PrefetchSettings


class PrefetchBuffer:
    """`fresh`: eid -> copy of each prefetch whose layer was not reached since. `lost` stays empty: nobody is evicted
    for a prefetch, so the guard has nothing to forbid either."""

    def __init__(self, core: CacheCore[Slot], copies: Copies) -> None:
        self._core, self._copies = core, copies
        self.schedule = Schedule(core.layers, core.experts)
        self.guard = PrefetchGuard(core.layers * core.experts)
        self.fresh: dict[int, Ticket] = {}
        self.lost: set[int] = set()
        self._waiting: deque[tuple[int, float, float]] = deque()  # (eid, score, priority), best first: no room yet
        self._passed: set[int] = set()  # buffered and not wanted; their copies are under way

    def configure(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Other rules for what is fetched, between two passes."""
        self.schedule.configure(old, new)
        self.guard.configure(old, new)

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """The routing of `layer` is known: prefetches for it that are not `wanted` end; those whose copy is under way
        give their slots back when it is over."""
        core, low = self._core, layer * self._core.experts
        inside = range(low, low + core.experts)
        self._waiting = deque(one for one in self._waiting if one[0] not in inside)
        for eid in [eid for eid in self.fresh if eid in inside and eid - low not in wanted]:
            if self.fresh[eid].state == STARTED:
                self._passed.add(eid)
            self.waste(eid, evicted=False)
        self._sweep()
        core.arrive(layer, [*(low + expert for expert in wanted), *self._passed])

    def issue(self, predictions: Sequence[Prediction], at: int, maps: Sequence[LayerMap] = ()) -> None:
        """Fetch what is predicted in layer `at`, best first, as far as the buffer has room and the copies can start
        before their layer is reached, by the times measured so far. Predictions replace those that still wait for room.
        `maps` are told to the eviction policy.
        """
        core, link, rhythm = self._core, self._copies.link, self.schedule.rhythm
        if core.uses_hints:
            for one in maps:
                core.hints.tell(*one)
            core.hints.name(predictions)
        if at >= 0:
            rhythm.note(self._copies.phase, at, link.now_s())
        self._rank_queued(predictions, at)
        self._waiting.clear()
        one_s = link.copy_s(self._copies.expert_bytes)
        busy_s = link.backlog_s() if one_s else 0.0
        lanes, until_s = link.lanes, dict[int, float]()  # by distance
        for layer, expert, score in self.schedule.sort(predictions, at):
            eid, distance = layer * core.experts + expert, self.schedule.distance(at, layer)
            if not self._is_wanted(eid):
                continue
            if distance not in until_s:
                until_s[distance] = rhythm.until(at, distance)
            if busy_s > until_s[distance]:
                break
            busy_s += one_s * (1 - len(core.table[eid]) / core.blocks) / lanes
            self._waiting.append((eid, score, score / distance))
        self.fill()

    def fill(self) -> None:
        """Fetch what waits, in the order of its ranking, as long as the buffer has room."""
        self._sweep()
        core, copies = self._core, self._copies
        while self._waiting:
            eid, score, priority = self._waiting[0]
            if self._is_wanted(eid):
                lacking, slots = core.held.lacking(eid), core.buffer(eid)
                if slots is None:
                    return
                ticket = copies.prepare(lacking, slots, demand=False)
                ticket.score, ticket.priority = score, priority
                self.fresh[eid] = ticket
                copies.counts.prefetch_issued += 1
                copies.link.submit(ticket)
            self._waiting.popleft()

    def waste(self, eid: int, *, evicted: bool) -> None:
        """Settle an unused prefetch: cancelled while it is queued, counted as wasted once it has used the link."""
        ticket, copies = self.fresh.pop(eid), self._copies
        if copies.link.cancel(ticket):
            copies.counts.prefetch_issued -= 1
        else:
            copies.counts.waste(ticket.bytes, evicted=evicted)

    def demanded(self, eid: int, ticket: Ticket) -> None:
        """`eid` was missing; no prefetch is to blame."""

    def take_back(self, ticket: Ticket) -> bool:
        """Cancel a queued prefetch and free its slots; False when its copy has started."""
        if not self._copies.link.cancel(ticket):
            return False
        self._core.drop(ticket.eid)
        return True

    def _rank_queued(self, predictions: Sequence[Prediction], at: int) -> None:
        """Queued prefetches that are predicted again take their newer score."""
        queued = {eid: ticket for eid, ticket in self.fresh.items() if ticket.state == QUEUED}
        changed: list[tuple[Ticket, float]] = []
        for layer, expert, score in predictions if queued else ():
            if (ticket := queued.get(layer * self._core.experts + expert)) is not None:
                ticket.score = score
                changed.append((ticket, score / self.schedule.distance(at, layer)))
        if changed:
            self._copies.link.rank(changed)

    def _is_wanted(self, eid: int) -> bool:
        """Whether an expert lacks blocks, and no layer that is computed has it."""
        return len(self._core.table[eid]) < self._core.blocks and eid not in self._core.leased

    def _sweep(self) -> None:
        """What was passed over gives its slots back where its copy is over."""
        buffered, tickets = self._core.held.buffered, self._copies.tickets
        for eid in [eid for eid in self._passed if eid not in tickets or tickets[eid].state != STARTED]:
            self._passed.discard(eid)
            if eid in buffered and eid not in self.fresh:
                self._core.drop(eid)
