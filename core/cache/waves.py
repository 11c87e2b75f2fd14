"""Runs a layer that needs more experts than there are slots in waves; used by the engine and the simulator."""

from __future__ import annotations

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
    """Lease all of `wanted`, in waves when they do not fit: while one wave is computed, the next one's experts are
    copied.

    Each lease is released when the next one is asked for. `look_ahead` is called once the last one is acquired.
    """
    if not wanted:
        look_ahead()
        return
    base, is_resident = layer * expert_cache.experts, expert_cache.is_resident
    yield from leases(
        waves(wanted, expert_cache.room(layer), lambda expert: is_resident(base + expert)),
        expert_cache.room(layer) > 1,
        lambda group: expert_cache.acquire(layer, group),
        release,
        look_ahead,
    )


def leases(
    groups: Sequence[Sequence[int]],
    two_fit: bool,
    acquire: Callable[[Sequence[int]], L],
    release: Callable[[L], None],
    look_ahead: Callable[[], None] = lambda: None,
) -> Iterator[L]:
    """Lease each group in turn; if two of them fit at once, the next one before this one is released."""
    lease = acquire(groups[0])
    for i, _ in enumerate(groups):
        last = i + 1 == len(groups)
        following = None if last or not two_fit else acquire(groups[i + 1])
        if last:
            look_ahead()
        yield lease
        release(lease)
        if not last:
            lease = acquire(groups[i + 1]) if following is None else following
