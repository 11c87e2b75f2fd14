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
    """Of one policy over `size` experts. `policy` and `last` include all requests noted so far; `order` leaves out the
    held ones, of experts that cannot be evicted before they are settled, and so is up to date for all others."""

    __slots__ = ("_eids", "_held", "_last", "_layers", "_policy", "counts_tokens", "retains", "uses_hints")

    def __init__(self, policy: Eviction, size: int) -> None:
        self._set(policy)
        self._last: Ints = np.full(size, -1)
        self._held: list[tuple[int, int, int]] = []  # (eid, tick, now) of leased experts, later than all pending ones
        self._eids: list[int] = []  # pending, of one layer after the other
        self._layers: list[int] = []  # for each: how many, the tick of the first, now. Flat: nothing to collect

    def note(self, tick: int, now: int, *layers: Sequence[int]) -> int:
        """Residents of some layers were requested, those of each all distinct: the first at the tick after `tick`, the
        next at the one after it, and so on -> the last one's."""
        self.settle()
        for eids in layers:
            self._eids += eids
            self._layers += (len(eids), tick + 1, now)
            tick += len(eids)
        if len(self._eids) > MOST:
            self.flush()
        return tick

    def hold(self, tick: int, now: int, eid: int) -> int:
        """A leased expert was requested, at the tick after `tick` -> that one."""
        self._held.append((eid, tick + 1, now))
        return tick + 1

    def settle(self) -> None:
        """What was held is pending from now on: the experts may be evicted."""
        for eid, tick, now in self._held:
            self._eids.append(eid)
            self._layers += (1, tick, now)
        self._held.clear()

    def left(self, eid: int) -> None:
        """An expert was evicted."""
        if any(held == eid for held, _, _ in self._held):  # after a copy that failed
            self.settle()
        self.order.left(eid)

    def flush(self) -> None:
        """Pass the pending requests to the policy: at once those of layers that follow one another in a pass."""
        eids, ticks, last, of = self._eids, list[int](), -1, -1  # not passed yet: ticks, greatest eid, now
        layers, self._eids, self._layers = iter(self._layers), [], []
        for count, tick, now in zip(layers, layers, layers, strict=True):
            some = eids[len(ticks) : len(ticks) + count]
            if ticks and (now != of or min(some, default=0) <= last):
                self._pass(eids[: len(ticks)], ticks, of)
                eids, ticks = eids[len(ticks) :], []
            ticks += range(tick, tick + count)
            last, of = max(some, default=last), now
        if ticks:
            self._pass(eids, ticks, of)

    def _pass(self, eids: Sequence[int], ticks: Sequence[int], now: int) -> None:
        ids = np.array(eids, np.int64)
        self._last[ids] = now
        self._policy.used(ids, np.array(ticks, np.int64), now)

    @property
    def order(self) -> Eviction:
        """The policy, up to date for all experts of which no request is held."""
        if self._eids:
            self.flush()
        return self._policy

    @property
    def policy(self) -> Eviction:
        """The policy, up to date."""
        self.settle()
        return self.order

    @policy.setter
    def policy(self, policy: Eviction) -> None:
        self.settle()
        self.flush()
        self._set(policy)

    def _set(self, policy: Eviction) -> None:
        self._policy = policy
        self.retains, self.uses_hints = policy.retains, policy.uses_hints  # constants: read without a flush
        self.counts_tokens = policy.counts_tokens

    @property
    def last(self) -> Ints:
        """The `now` of the last request by eid; -1 = never."""
        self.settle()
        self.flush()
        return self._last
