"""Requests of residents, told to the eviction policy many at a time: before somebody asks it, or once there are many.

A layer all of whose experts are resident asks the policy nothing, and then a request costs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.policy.eviction import Eviction
from core.policy.eviction.base import Ints

MOST = 8192  # of them that wait


class Uses:
    """Of one policy over `size` experts. Whoever asks for the policy or the last uses finds in them all that was
    noted before."""

    __slots__ = ("_eids", "_last", "_layers", "_policy", "retains", "uses_hints")

    def __init__(self, policy: Eviction, size: int) -> None:
        self._set(policy)
        self._last: Ints = np.full(size, -1)
        self._eids: list[int] = []  # noted, of one layer after the other
        self._layers: list[int] = []  # for each: how many, the tick of the first, now. Flat: nothing to collect

    def note(self, eids: Sequence[int], tick: int, now: int) -> None:
        """Residents were requested, all distinct: the first at `tick`, the next at the one after it, and so on."""
        self._eids += eids
        self._layers += (len(eids), tick, now)
        if len(self._eids) > MOST:
            self._tell()

    @property
    def policy(self) -> Eviction:
        """The policy, which knows of every use."""
        if self._eids:
            self._tell()
        return self._policy

    @policy.setter
    def policy(self, policy: Eviction) -> None:
        self._tell()
        self._set(policy)

    def _set(self, policy: Eviction) -> None:
        self._policy = policy
        self.retains, self.uses_hints = policy.retains, policy.uses_hints  # may be asked without telling it

    @property
    def last(self) -> Ints:
        """The `now` of the last request by eid; -1 = never."""
        self._tell()
        return self._last

    def _tell(self) -> None:
        every, layers, at = np.array(self._eids, np.int64), iter(self._layers), 0
        self._eids, self._layers = [], []
        for count, tick, now in zip(layers, layers, layers, strict=True):
            ids = every[at : at + count]
            at += count
            self._last[ids] = now
            self._policy.used(ids, np.arange(tick, tick + count), now)
