"""Runs a layer that needs more experts than there are slots in waves; used by the engine and the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from core.policy.allocation.slots import waves

if TYPE_CHECKING:
    from core.cache.expert_cache import ExpertCache
    from core.cache.lease import Lease

L = TypeVar("L")  # a lease, whatever the cache's kind


def in_waves(
    expert_cache: ExpertCache,
    layer: int,
    wanted: Sequence[int],
    release: Callable[[Lease], None],
    look_ahead: Callable[[], None],
) -> Iterator[Lease]:
    """Lease all of `wanted`, in waves when they do not fit: while one wave is computed, the experts of later ones are
    copied.

    Each lease is released when the next one is asked for. `look_ahead` is called once the last one is acquired.
    """
    if not wanted:
        look_ahead()
        return
    base, is_resident, room = layer * expert_cache.experts, expert_cache.is_resident, expert_cache.room(layer)
    yield from leases(
        waves(wanted, room, lambda expert: is_resident(base + expert)),
        room,
        lambda group: expert_cache.acquire(layer, group),
        release,
        look_ahead,
    )


def leases(
    groups: Sequence[Sequence[int]],
    room: int,
    acquire: Callable[[Sequence[int]], L],
    release: Callable[[L], None],
    look_ahead: Callable[[], None] = lambda: None,
) -> Iterator[L]:
    """Lease each group in turn, and as many of the following ones ahead as fit into `room` experts with it: what is
    missing of them is copied meanwhile, and the residents among them are kept."""
    ahead: deque[L] = deque()
    acquired = held = 0  # groups so far, and experts that are leased
    for i, group in enumerate(groups):
        while acquired < len(groups) and (acquired == i or held + len(groups[acquired]) <= room):
            ahead.append(acquire(groups[acquired]))
            held += len(groups[acquired])
            acquired += 1
            if acquired == len(groups):
                look_ahead()
        lease = ahead.popleft()
        yield lease
        release(lease)
        held -= len(group)
