"""Requests of resident experts, passed to the eviction policy in batches: before its state is read, or once there are
many.

A layer all of whose experts are resident reads nothing of the policy, so that such a request costs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.policy.eviction import Eviction
from core.policy.eviction.base import Ints

MOST = 8192  # pending requests


class UseLog:
    """Of one policy over `size` experts. `policy` and `last` include all requests noted so far."""

    __slots__ = ("_eids", "_last", "_layers", "_policy", "counts_tokens", "retains", "uses_hints")

    def __init__(self, policy: Eviction, size: int) -> None:
        self._set(policy)
        self._last: Ints = np.full(size, -1)
        self._eids: list[int] = []  # pending, of one layer after the other
        self._layers: list[int] = []  # for each: how many, the tick of the first, now. Flat: nothing to collect

    def note(self, tick: int, now: int, *layers: Sequence[int]) -> int:
        """Residents of some layers were requested, those of each all distinct: the first at the tick after `tick`, the
        next at the one after it, and so on -> the last one's."""
        for eids in layers:
            self._eids += eids
            self._layers += (len(eids), tick + 1, now)
            tick += len(eids)
        if len(self._eids) > MOST:
            self.flush()
        return tick

    def flush(self) -> None:
        """Pass the pending requests to the policy."""
        every, layers, at = np.array(self._eids, np.int64), iter(self._layers), 0
        self._eids, self._layers = [], []
        for count, tick, now in zip(layers, layers, layers, strict=True):
            ids = every[at : at + count]
            at += count
            self._last[ids] = now
            self._policy.used(ids, np.arange(tick, tick + count), now)

    @property
    def policy(self) -> Eviction:
        """The policy, up to date."""
        if self._eids:
            self.flush()
        return self._policy

    @policy.setter
    def policy(self, policy: Eviction) -> None:
        self.flush()
        self._set(policy)

    def _set(self, policy: Eviction) -> None:
        self._policy = policy
        self.retains, self.uses_hints = policy.retains, policy.uses_hints  # constants: read without a flush
        self.counts_tokens = policy.counts_tokens

    @property
    def last(self) -> Ints:
        """The `now` of the last request by eid; -1 = never."""
        self.flush()
        return self._last
