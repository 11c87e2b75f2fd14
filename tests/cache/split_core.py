"""A cache of blocks, of which layers keep the tops: tokens and prompts through it."""

import itertools
from collections.abc import Sequence

from core.cache.core import CacheCore
from core.cache.lease import in_waves
from core.cache.pool import numbered_pools
from core.policy.eviction import MakePolicy
from core.settings.registry import create, variants
from core.types import Segment

LAYERS, EXPERTS, K, BLOCKS = 2, 6, 2, 4


NAMES = [v.name for v in variants("eviction")]


def policy(name: str) -> MakePolicy:
    return lambda expert_index: create("eviction", name, {}, expert_index=expert_index)


def split_core(
    capacities: Sequence[int],
    tops: Sequence[int],
    name: str = "lru",
    experts: int = EXPERTS,
    blocks: int = BLOCKS,
    buffer: int = K * BLOCKS,
    lost: list[tuple[int, int]] | None = None,
) -> CacheCore[int]:
    """Layers with so many blocks each, and a buffer; `lost` gets (eid, blocks kept) of whatever is cut or evicted."""
    lost = [] if lost is None else lost
    layers = len(tops)
    core: CacheCore[int] = CacheCore(
        layers,
        experts,
        policy(name),
        numbered_pools(layers * experts, capacities),
        blocks=blocks,
        on_loss=lambda eid, kept: lost.append((eid, kept)),
    )
    number = itertools.count()
    for pool in core.pools:
        pool.free = [next(number) for _ in pool.free]
    core.transit = [next(number) for _ in range(buffer)]
    core.split(tops)
    return core


def token(core: CacheCore[int], layer: int, wanted: Sequence[int]) -> list[Segment]:
    """A layer of one token -> the segments that had to be copied."""
    eids = [layer * core.experts + expert for expert in wanted]
    core.arrive(layer, eids)
    copied = []
    for eid in core.lease(layer, eids):
        copied.append(core.held.lacking(eid))
        slots = core.admit_requested(eid)
        assert slots is not None and len(slots) == len(copied[-1].blocks)
    assert all(len(core.table[eid]) == core.blocks for eid in eids), "an expert is computed whole"
    core.release(eids)
    core.check_integrity()
    return copied


def prompt(core: CacheCore[int], layer: int, wanted: Sequence[int]) -> list[Segment]:
    """A layer of many tokens, in waves if need be -> the segments that had to be copied."""
    copied: list[Segment] = []

    def acquire(group: Sequence[int]) -> Sequence[int]:
        eids = [layer * core.experts + expert for expert in group]
        for eid in core.lease(layer, eids):
            copied.append(core.held.lacking(eid))
            assert core.admit_requested(eid) is not None
        return eids

    for eids in in_waves(core, layer, wanted, acquire, core.release):
        assert all(len(core.table[eid]) == core.blocks for eid in eids), "an expert is computed whole"
    core.check_integrity()
    return copied


def lengths(core: CacheCore[int]) -> dict[int, int]:
    return {eid: len(slots) for eid, slots in enumerate(core.table) if slots}
