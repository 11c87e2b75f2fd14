"""Requests of residents, told to the eviction policy many at a time: before somebody asks it, or once there are many.

A layer all of whose experts are resident asks the policy nothing, and then a request costs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.policy.eviction import Eviction
from core.policy.eviction.base import Ints

MOST = 4096  # requests, of a layer each, that wait


class Uses:
    """Of one policy over `size` experts. Whoever asks for the policy or the last uses finds in them all that was
    noted before."""

    __slots__ = ("_last", "_noted", "_policy")

    def __init__(self, policy: Eviction, size: int) -> None:
        self._policy = policy
        self._last: Ints = np.full(size, -1)
        self._noted: list[tuple[Sequence[int], int, int]] = []  # (experts, tick of the first, now)

    def note(self, eids: Sequence[int], tick: int, now: int) -> None:
        """Residents were requested, all distinct: the first at `tick`, the next at the one after it, and so on. Their
        list is kept and must not change."""
        self._noted.append((eids, tick, now))
        if len(self._noted) > MOST:
            self._tell()

    @property
    def policy(self) -> Eviction:
        """The policy, which knows of every use."""
        if self._noted:
            self._tell()
        return self._policy

    @policy.setter
    def policy(self, policy: Eviction) -> None:
        self._tell()
        self._policy = policy

    @property
    def policy_type(self) -> type[Eviction]:
        """The class of the policy."""
        return type(self._policy)

    @property
    def last(self) -> Ints:
        """The `now` of the last request by eid; -1 = never."""
        self._tell()
        return self._last

    def _tell(self) -> None:
        noted, self._noted = self._noted, []
        for eids, tick, now in noted:
            ids = np.array(eids, np.int64)
            self._last[ids] = now
            self._policy.used(ids, np.arange(tick, tick + len(ids)), now)
