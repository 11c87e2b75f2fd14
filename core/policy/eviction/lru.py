"""Least recently used: the baseline of every paper here, and the policy of Mixtral-offloading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import ClassVar

from core.registry import register


@register("eviction", "lru", title="LRU", help="The expert unused for longest leaves. Good when the same experts come "
          "back soon; falls to nothing when one pass needs more experts than there are slots.",
          source="Mixtral-offloading (Eliseev and Mazur 2023)")
class LRU:
    """An ordered dict from least to most recently used."""

    keeps: ClassVar[bool] = True

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, eid: int, now: int) -> None:
        self._order[eid] = None

    def use(self, eid: int, now: int) -> None:
        self._order.move_to_end(eid)

    def remove(self, eid: int) -> None:
        del self._order[eid]

    def victim(self, blocked: Container[int]) -> int | None:
        return next((eid for eid in self._order if eid not in blocked), None)
