"""Random replacement: what a policy must beat to have learnt anything from the past."""

from __future__ import annotations

from collections.abc import Container
from random import Random
from typing import ClassVar

from core.registry import Param, register


@register("eviction", "random", title="Random", help="A random resident leaves. What a policy must beat.",
          source="control; MoEpic section 6 (ablation without LCP)",
          params=(Param("seed", "int", 0, "Which random sequence.", title="Seed", low=0, high=2**31 - 1, step=1),))
class RandomEviction:
    """Residents in a list with swap-removal, so that one draw is O(1)."""

    keeps: ClassVar[bool] = True

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._at: dict[int, int] = {}
        self._residents: list[int] = []

    def admit(self, eid: int, now: int) -> None:
        self._at[eid] = len(self._residents)
        self._residents.append(eid)

    def use(self, eid: int, now: int) -> None:
        """Being used changes nothing."""

    def remove(self, eid: int) -> None:
        at, last = self._at.pop(eid), self._residents.pop()
        if last != eid:
            self._residents[at], self._at[last] = last, at

    def victim(self, blocked: Container[int]) -> int | None:
        for _ in range(8):
            if self._residents and (eid := self._random.choice(self._residents)) not in blocked:
                return eid
        free = [eid for eid in self._residents if eid not in blocked]
        return self._random.choice(free) if free else None
