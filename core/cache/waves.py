"""Runs a layer that needs more experts than there are slots in waves; used by the engine and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease
from core.policy.allocation.slots import waves


def in_waves(
    expert_cache: ExpertCache,
    layer: int,
    wanted: Sequence[int],
    release: Callable[[Lease], None],
    look_ahead: Callable[[], None],
) -> Iterator[Lease]:
    """Lease all of `wanted`, in waves when they do not fit: while one wave is computed, the next one's experts are
    copied.

    Each lease is released when the next one is asked for. `look_ahead` is called once the last one is acquired.
    """
    if not wanted:
        look_ahead()
        return
    capacity, base = expert_cache.room(layer), layer * expert_cache.experts
    groups = waves(wanted, capacity, lambda expert: expert_cache.is_resident(base + expert))
    lease: Lease | None = expert_cache.acquire(layer, groups[0])
    for i in range(len(groups)):
        last, room = i + 1 == len(groups), capacity > 1
        following = None if last or not room else expert_cache.acquire(layer, groups[i + 1])
        if last:
            look_ahead()
        assert lease is not None
        yield lease
        release(lease)
        lease = following or (None if last else expert_cache.acquire(layer, groups[i + 1]))
