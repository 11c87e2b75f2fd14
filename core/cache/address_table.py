"""Where kernels read each expert: in its slot, or else in pinned host memory. The one table of it is on the device.

It serves a token whose experts the host learns only when it is computed (`core.runtime.device_step`): `sync_table`,
then computing the token, then `request`. The table changes in the computing stream between two tokens alone: kernels
launched before read the old table, those launched afterwards the new one. A token may also be requested once the next
one is launched, which reads slots until a fence. An expert whose copy into a slot is not known to have landed is read
in host memory, or computed there by the host.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import LeasedSegment


class AddressTable:
    """Follows the slots of one expert cache, whose experts have one block each. `addresses` [layers, experts] int64 on
    the device."""

    def __init__(
        self, expert_cache: ExpertCache, home: Sequence[int], device: torch.device, *, hosted: bool = False
    ) -> None:
        """`home` [layers * experts] = the addresses in host memory. `hosted`: the host computes what has no slot."""
        self._expert_cache, self._home, self._hosted = expert_cache, list(home), hosted
        with torch.inference_mode(False):
            self._staged = torch.tensor(self._home, dtype=torch.int64).pin_memory()
            self._flat = self._staged.to(device)
        self.addresses = self._flat.view(expert_cache.layers, expert_cache.experts)
        self._in_slot = bytearray(len(self._home))
        self._changed = set(range(len(self._home)))
        self._submitted: set[int] = set()  # copies for the last token: the next one does not wait for them
        self._in_flight: frozenset[int] = frozenset()  # experts whose copy had not landed when the last token began
        expert_cache.core.held.changed = self._changed

    def sync_table(self) -> float:
        """Before a token: the table follows the cache, and the computing stream waits for copies into the slots that it
        names -> seconds that this thread was blocked. Copies have the time of one token: the stream waits for older
        ones, but not for those of experts that the host computes until then. Raises the errors of copies."""
        copies, waited_s = self._expert_cache.copies, 0.0
        for eid in [eid for eid in copies.tickets if eid not in self._submitted]:
            if self._hosted and copies.tickets[eid].error is None:
                copies.pending(eid)  # which forgets it once it has landed
                continue
            waited_s += copies.link.wait(copies.tickets[eid])
            del copies.tickets[eid]
        self._update(self._in_flight - copies.tickets.keys())
        self._submitted.clear()
        self._in_flight = frozenset(copies.tickets)
        return waited_s

    def request(
        self, routed: Sequence[Sequence[int]], in_slot: bytes | None = None, fence: Any = None
    ) -> list[list[LeasedSegment] | None]:
        """After a token, for which the host has waited: `routed` [layers][k] are the experts that it was computed with
        -> each layer's requests, whose outcomes are where the kernels read the experts; None = in slots, all of them.
        The missing ones are admitted and copied; of those that the host computed, what the policy
        ranks above others. `in_slot`: the `slotted` of that token, None = there was no `sync_table` since; `fence`: an
        event behind the token that was launched since."""
        requests, copies, there = self._expert_cache.requests, self._expert_cache.copies, in_slot or self._in_slot
        copies.fence = fence
        try:
            found, submitted = requests.replay(routed, lambda eid: bool(there[eid]), hosted=self._hosted)
        finally:
            copies.fence = None
        self._submitted.update(submitted)
        return found

    def slotted(self) -> bytes:
        """Of each expert, whether kernels read it in its slot since the last `sync_table`."""
        return bytes(self._in_slot)

    def in_slot(self, eid: int) -> bool:
        """Whether kernels read an expert in its slot since the last `sync_table`."""
        return bool(self._in_slot[eid])

    def close(self) -> None:
        """Stop following the cache."""
        self._expert_cache.core.held.changed = None

    def check(self) -> None:
        """Raise AssertionError unless the table on the device is what the cache has. Between two tokens; waits for the
        device."""
        table, tickets = self._expert_cache.core.table, self._expert_cache.copies.tickets
        for eid, address in enumerate(self._flat.tolist()):
            if eid in self._changed or eid in tickets or eid in self._in_flight:  # as the next token will find it
                continue
            want = table[eid][0].raw.data_ptr() if table[eid] else self._home[eid]
            assert address == want, f"kernels would not find expert {eid} where it is"
            assert self.in_slot(eid) == bool(table[eid]), f"the host has another address of expert {eid}"

    def _update(self, landed: Collection[int]) -> None:
        """Write the addresses of experts whose slots changed, and of `landed`, whose copies have ended where the
        computing stream is. No kernel that reads the table may be running that the host has not waited for."""
        table, tickets, changed = self._expert_cache.core.table, self._expert_cache.copies.tickets, self._changed
        changed.update(landed)
        if not changed:
            return
        eids = sorted(changed)
        changed.clear()
        found = [table[eid][0].raw.data_ptr() if table[eid] and eid not in tickets else 0 for eid in eids]
        for eid, address in zip(eids, found, strict=True):
            self._in_slot[eid] = address > 0
        values = [address or self._home[eid] for eid, address in zip(eids, found, strict=True)]
        self._staged[torch.tensor(eids)] = torch.tensor(values, dtype=torch.int64)
        self._flat.copy_(self._staged, non_blocking=True)
