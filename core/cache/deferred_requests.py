"""The requests of a token whose experts the host learns only when it is computed, as `core.runtime.device_step` does.

Kernels have read each expert where it was when the token began: in its slot, or over the link in host memory. So a
request's outcome is what was there then, and what was missing is admitted afterwards, by the same requests to the same
core, in the same order, as if the token had been computed layer by layer: the cache is then in the same state. Part of
`core.cache.expert_cache`, on the compute thread; experts have one block each.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.cache.address_table import AddressTable
from core.cache.expert_cache import ExpertCache
from core.cache.lease import LeasedSegment
from core.types import Outcome


class DeferredRequests:
    """Of one cache, read where `table` says. A token: `bring_up`, computing it, `settle`."""

    def __init__(self, expert_cache: ExpertCache, table: AddressTable) -> None:
        self._expert_cache, self._table = expert_cache, table
        self._issued: set[int] = set()  # copies that the last token led to: the next one does not wait for them
        self._under_way: frozenset[int] = frozenset()  # experts whose copy was not over when the last token began

    def bring_up(self) -> float:
        """Before a token: have it read what landed in slots, in the computing stream -> seconds that this thread was
        blocked. Copies are given the time of one token: older ones are waited for by that stream. Raises the errors of
        copies."""
        copies = self._expert_cache.copies
        waited_s = 0.0
        for eid in [eid for eid in copies.tickets if eid not in self._issued]:
            waited_s += copies.link.wait(copies.tickets[eid])
            del copies.tickets[eid]
        self._table.bring_up(self._under_way - copies.tickets.keys())
        self._issued.clear()
        self._under_way = frozenset(copies.tickets)
        return waited_s

    def settle(self, routed: Sequence[Sequence[int]]) -> list[list[LeasedSegment]]:
        """After a token, whose kernels the host has waited for: `routed` [layers][k] are the experts that it was
        computed with -> each layer's requests with their outcomes, in the order in which they count. Copies of what is
        admitted are issued once all layers are through, so that what leaves again at once is never copied."""
        core, copies = self._expert_cache.core, self._expert_cache.copies
        admitted: dict[int, None] = {}
        requests = []
        for layer, chosen in enumerate(routed):
            base, wanted = layer * core.experts, dict.fromkeys(chosen)
            eids = [base + expert for expert in wanted]
            missing = core.lease(layer, eids)
            self._expert_cache.prefetch_queue.guard.used(eids)
            for eid in missing:
                if core.admit(eid, core.leased, in_transit=True) is None:
                    raise RuntimeError(f"layer {layer} needs more slots than its pool has")
                core.use(eid)
                admitted[eid] = None
            core.release(eids)
            if core.transit:
                copies.counts.bypassed += sum(not core.is_resident(eid) for eid in missing)
            lacking = {*missing}
            order = [eid for eid in eids if eid not in lacking] + missing
            requests.append([self._request(eid, base) for eid in order])
        for eid in admitted:
            if core.is_resident(eid) and eid not in copies.tickets:
                copies.counts.demand_bytes += copies.demand(copies.whole[eid], core.table[eid]).bytes
                self._issued.add(eid)
        return requests

    def _request(self, eid: int, base: int) -> LeasedSegment:
        copies = self._expert_cache.copies
        if self._table.in_slot(eid):
            outcome = Outcome.HIT
        else:  # kernels read it over the link, also while a copy into its slot was under way
            outcome = copies.miss(eid)
            copies.counts.demand_bytes += copies.expert_bytes
        return LeasedSegment(eid - base, copies.whole[eid], (), outcome, None)
