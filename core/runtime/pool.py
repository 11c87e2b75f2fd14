"""One pool of slots and the policy that rules it: a layer's own, or the one that all layers share."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from core.memory.arena import Slot
from core.policy.eviction import Eviction


@dataclass(slots=True)
class Pool:
    """`capacity` slots, of which `free` hold nothing. Mutated by Residency only."""

    policy: Eviction
    capacity: int = 0
    free: list[Slot] = field(default_factory=list)
    residents: set[int] = field(default_factory=set)

    def victim(self, *blocked: Container[int]) -> int | None:
        """Whom the policy would let go, outside every container of `blocked`."""
        return self.policy.victim(_Union(blocked))


class _Union:
    """Membership in any of several containers, without building their union."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[Container[int], ...]) -> None:
        self._parts = parts

    def __contains__(self, eid: object) -> bool:
        return any(eid in part for part in self._parts)


def shares(slots: int, pools: int) -> list[int]:
    """Split `slots` over `pools` as evenly as whole slots allow, earlier pools first."""
    return [slots // pools + (1 if i < slots % pools else 0) for i in range(pools)]
