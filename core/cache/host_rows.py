"""Which experts have a row of host memory: the same cache mechanism as on the device, one pool for all layers. A row
holds a whole expert."""

from itertools import compress

import numpy.typing as npt

from core.cache.core import CacheCore
from core.cache.pool import numbered_pools
from core.policy.eviction import MakePolicy


class HostRows:
    """Serves `core.memory.disk.HostCache`, which holds a lock around every call. A pass of the policy is one of the
    model; an expert counts as used whenever it is copied to the device."""

    def __init__(self, layers: int, experts: int, rows: int, make_policy: MakePolicy) -> None:
        self._rows = rows
        self._core = CacheCore(layers, experts, make_policy, numbered_pools(layers * experts, [rows]))

    def begin_pass(self, now: int) -> None:
        """Forward pass number `now` begins."""
        self._core.now = now

    def use_policy(self, make_policy: MakePolicy, usual: npt.ArrayLike) -> None:
        """Another policy decides from now on; every expert keeps its row. `usual` [layers * experts] = how often a
        profile saw each expert."""
        self._core.hints.profile(usual)
        self._core.rebuild(make_policy, [self._rows])

    def has(self, eid: int) -> bool:
        """Whether an expert has a row."""
        return self._core.is_resident(eid)

    def held(self) -> list[int]:
        """The experts that have a row."""
        return list(compress(range(len(self._core.table)), self._core.table))

    def lease(self, eid: int) -> tuple[int, bool]:
        """The row of an expert, and whether it held the expert before. It stays until `release` or `evict`. Raises
        RuntimeError when every row is leased."""
        core = self._core
        missing = core.lease(eid // core.experts, [eid])
        if missing:
            if core.admit_requested(eid) is None:
                core.release([eid])
                raise RuntimeError("more experts are copied at once than host memory has rows")
        (row,) = core.table[eid]
        return row, not missing

    def release(self, eid: int) -> None:
        """The row was copied from."""
        self._core.release([eid])

    def evict(self, eid: int) -> None:
        """The row does not hold the expert: reading it failed."""
        self._core.release([eid])
        if self._core.is_resident(eid):
            self._core.evict(eid)
