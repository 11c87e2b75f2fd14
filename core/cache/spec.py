"""What an expert cache is built from: its dimensions and rules, and the memory that it stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt

from core.memory.slot import Slot
from core.memory.ticket import Link
from core.policy.eviction import MakePolicy
from core.types import Origin


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """`slots`: blocks that the device may hold, `blocks` of each expert. `scope`: one pool of slots per "layer", or
    "global" for one that all layers share. `divide`: slots of all pools -> slots per layer, evenly if None. `transit`:
    of the slots, those of so many experts are set aside, see `core.cache.core`."""

    layers: int
    experts: int  # of a layer
    slots: int
    scope: str
    make_policy: MakePolicy
    blocks: int = 1
    transit: int = 0
    divide: Callable[[int], Sequence[int]] | None = None


class SlotArena(Protocol):
    """Allocates slots: `core.memory.arena.Arena`, or a simulated one."""

    def expect(self, count: int) -> None: ...
    def allocate(self) -> Slot: ...
    def free(self, slot: Slot) -> None: ...
    def pack(self, busy: Iterable[Slot]) -> None: ...
    def __len__(self) -> int: ...


class ExpertSource(Protocol):
    """Has all experts in host memory or on disk: `core.memory.store.ExpertStore`, or a simulated one."""

    @property
    def blob_bytes(self) -> int: ...
    def use_policy(self, make_policy: MakePolicy, usual: npt.ArrayLike) -> None: ...
    def begin_pass(self, now: int) -> None: ...
    def origin(self, eid: int) -> Origin: ...
    def host_resident(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Where slots are allocated, where experts are copied from, and what copies them."""

    arena: SlotArena
    store: ExpertSource
    link: Link
