"""Least frequently used, optionally forgetting: the policy of MoE-Infinity's cache."""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import ClassVar

from core.registry import Param, register


@register("eviction", "lfu", title="LFU", help="The expert used least often leaves; among equals the one unused for "
          "longest. With a half-life, old uses count less and less.", source="MoE-Infinity (Xue et al. 2024)",
          params=(Param("half_life", "int", 0, "After this many tokens a use counts half. 0 = never forgets.",
                        title="Half-life", low=0, high=100_000, step=1, unit="tokens"),))
class LFU:
    """Counts of all experts ever seen, and a heap with lazy deletion over the residents.

    Forgetting is done by letting later uses weigh more (2^(now / half_life)), which orders experts exactly as decaying
    all older ones would, without touching them; the scale is brought back before it overflows.
    """

    keeps: ClassVar[bool] = True

    def __init__(self, half_life: int = 0) -> None:
        self._half_life = half_life
        self._base = 0
        self._count: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._resident: set[int] = set()
        self._heap: list[tuple[float, int, int]] = []
        self._tick = 0

    def admit(self, eid: int, now: int) -> None:
        self._resident.add(eid)
        self._push(eid)

    def use(self, eid: int, now: int) -> None:
        if self._half_life and (now - self._base) / self._half_life > 512:
            self._rescale(now)
        weight = 2.0 ** ((now - self._base) / self._half_life) if self._half_life else 1.0
        self._count[eid] = self._count.get(eid, 0.0) + weight
        self._push(eid)

    def remove(self, eid: int) -> None:
        self._resident.discard(eid)

    def victim(self, blocked: Container[int]) -> int | None:
        held: list[tuple[float, int, int]] = []
        found: int | None = None
        while self._heap and found is None:
            entry = self._heap[0]
            _, tick, eid = entry
            if eid not in self._resident or self._last[eid] != tick:
                heapq.heappop(self._heap)
            elif eid in blocked:
                held.append(heapq.heappop(self._heap))
            else:
                found = eid
        for entry in held:
            heapq.heappush(self._heap, entry)
        return found

    def _push(self, eid: int) -> None:
        self._tick += 1
        self._last[eid] = self._tick
        heapq.heappush(self._heap, (self._count.get(eid, 0.0), self._tick, eid))
        if len(self._heap) > 64 + 8 * len(self._resident):
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._count.get(e, 0.0), self._last[e], e) for e in self._resident]
        heapq.heapify(self._heap)

    def _rescale(self, now: int) -> None:
        factor = 2.0 ** ((self._base - now) / self._half_life)
        self._base = now
        self._count = {eid: count * factor for eid, count in self._count.items()}
        self._rebuild()
