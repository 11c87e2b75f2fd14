"""Where kernels read each expert: in its slot, or else in pinned host memory. The one table of it is on the device.

It changes between two tokens alone, in the computing stream: what was launched before reads the old table, what is
launched afterwards the new one. An expert whose copy into a slot is not known to be over is read in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from core.cache.expert_cache import ExpertCache


class AddressTable:
    """Follows the slots of one expert cache, whose experts have one block each. `addresses` [layers, experts] int64 on
    the device."""

    def __init__(self, expert_cache: ExpertCache, home: Sequence[int], device: torch.device) -> None:
        """`home` [layers * experts] = the addresses in host memory."""
        self._expert_cache, self._home = expert_cache, list(home)
        with torch.inference_mode(False):
            self._staged = torch.tensor(self._home, dtype=torch.int64).pin_memory()
            self._flat = self._staged.to(device)
        self.addresses = self._flat.view(expert_cache.layers, expert_cache.experts)
        self._in_slot = bytearray(len(self._home))
        self._changed = set(range(len(self._home)))
        expert_cache.core.held.changed = self._changed

    def in_slot(self, eid: int) -> bool:
        """Whether kernels read an expert in its slot since the last `bring_up`."""
        return bool(self._in_slot[eid])

    def bring_up(self, landed: Collection[int]) -> None:
        """Follow what has changed, between two tokens: nothing that reads the table may be under way that the host has
        not waited for. The copies of `landed` are over where the computing stream stands."""
        table, tickets, changed = self._expert_cache.core.table, self._expert_cache.copies.tickets, self._changed
        changed.update(landed)
        if not changed:
            return
        eids = sorted(changed)
        changed.clear()
        found = [table[eid][0].raw.data_ptr() if table[eid] and eid not in tickets else 0 for eid in eids]
        for eid, at in zip(eids, found, strict=True):
            self._in_slot[eid] = at > 0
        values = [at or self._home[eid] for eid, at in zip(eids, found, strict=True)]
        self._staged[torch.tensor(eids)] = torch.tensor(values, dtype=torch.int64)
        self._flat.copy_(self._staged, non_blocking=True)

    def close(self) -> None:
        """Follow nothing any more."""
        self._expert_cache.core.held.changed = None

    def check(self) -> None:
        """Raise AssertionError unless the table on the device is what the cache has. Between two tokens; waits for the
        device."""
        told, table, tickets = self._flat.tolist(), self._expert_cache.core.table, self._expert_cache.copies.tickets
        for eid, at in enumerate(told):
            if eid in self._changed or eid in tickets:
                continue
            want = table[eid][0].raw.data_ptr() if table[eid] else self._home[eid]
            assert at == want, f"kernels would not find expert {eid} where it is"
            assert self.in_slot(eid) == bool(table[eid]), f"where expert {eid} is was told wrongly"
