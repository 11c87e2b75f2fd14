"""Experts of several blocks, each in a slot of its own: the cache decides as it does for experts of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.cache.requests import Requests
from core.cache.spec import CacheMemory, CacheSpec
from core.memory.ticket import Ticket
from core.policy.eviction import policy_maker
from core.policy.predict import Prediction
from core.settings.param import Choice
from core.settings.registry import variants
from core.simulate.virtual_clock import VirtualExperts, VirtualLink, VirtualSlots
from core.types import Residence
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import layered

K, BYTES = 2, 60
NAMES = [v.name for v in variants("eviction")]
OFTEN = {*itertools.product(("lru", "lfu", "lcp", "plec", "none"), ("layer",)), ("plec", "global")}
ids = st.integers(0, EXPERTS - 1)


class Move(NamedTuple):
    """What happens to a cache: a pass over one layer, predictions made in it, and later another size or a loan."""

    layer: int
    wanted: list[int]
    predicted: list[tuple[int, int]]
    seconds: float
    room: int  # experts per layer from now on; 0 = as before
    lends: bool


moves = st.builds(
    Move,
    st.integers(0, LAYERS - 1),
    st.lists(ids, min_size=1, max_size=K, unique=True),
    st.lists(st.tuples(st.integers(0, LAYERS - 1), ids), max_size=4, unique=True),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0, 0, 0, K, K + 1, EXPERTS]),
    st.booleans(),
)


def virtual(blocks: int, room: int, scope: str, eviction: str) -> tuple[ExpertCache, list[tuple[Any, ...]]]:
    """A cache with `room` experts per layer on a virtual clock, and a list of its copies. Prefetches evict other
    experts, also where these have several blocks."""
    copied: list[tuple[Any, ...]] = []

    def fetch(ticket: Ticket) -> None:
        assert len({slot.index for slot in ticket.slots}) == blocks, "a slot for each block"
        copied.append((*ticket.segment, ticket.bytes, ticket.demand))

    spec = CacheSpec(LAYERS, EXPERTS, LAYERS * room * blocks, scope, policy_maker(Choice(eviction)), blocks=blocks)
    cache = ExpertCache(spec, CacheMemory(VirtualSlots(), VirtualExperts(BYTES), VirtualLink(0.5, fetch)))
    cache.requests = Requests(cache.core, cache.copies, to_buffer=False)
    return cache, copied


def place(cache: ExpertCache, eid: int) -> Residence:
    """Of one expert, as a reader of the map would say."""
    held = len(cache.core.table[eid])
    if not held:
        return Residence.DISK if cache.store.origin(eid) == "disk" else Residence.HOST
    if eid in cache.copies.flying():
        return Residence.IN_FLIGHT
    return Residence.RESIDENT if held == cache.core.blocks else Residence.PART


def play(cache: ExpertCache, move: Move) -> list[tuple[Any, ...]]:
    """Make one move -> what every request met, and what is where afterwards."""
    link: Any = cache.copies.link
    blocks = cache.core.blocks
    cache.begin_pass("decode", 1)
    cache.arrive(move.layer, move.wanted)
    lease = cache.acquire(move.layer, move.wanted)
    cache.prefetch([Prediction(layer, e, 1 / (2 + i)) for i, (layer, e) in enumerate(move.predicted)], move.layer)
    seen: list[tuple[Any, ...]] = []
    for leased in lease.segments:
        assert leased.segment == (move.layer * EXPERTS + leased.expert, range(blocks)), "an expert is one segment"
        assert tuple(leased.slots) == cache.core.table[leased.segment.eid]
        waited_s = link.wait(leased.ticket) if leased.ticket is not None else None
        seen.append((leased.expert, leased.outcome, waited_s))
    link.advance(move.seconds)
    cache.release(lease, fence := object())
    assert all(slot.fence is fence for leased in lease.segments for slot in leased.slots)
    cache.check_integrity()
    if move.room:
        cache.reshape(slots=LAYERS * move.room * blocks)
        cache.check_integrity()
    if move.lends:
        link.advance(1e3)
        loan = cache.set_aside(K)
        other = cache.acquire(move.layer, [0, 1])
        seen.append(tuple(leased.outcome for leased in other.segments))
        cache.release(other)
        cache.take_back(loan, lambda: False)
        cache.check_integrity()
    assert list(cache.places()) == [place(cache, eid) for eid in range(LAYERS * EXPERTS)]
    return [*seen, (cache.places(), cache.room(move.layer), cache.counts.figures())]


@pytest.mark.parametrize(
    ("eviction", "scope"),
    layered(itertools.product(NAMES, ("layer", "global")), quick=lambda case: case in OFTEN),
)
@settings(max_examples=15)
@given(blocks=st.sampled_from([2, 3]), room=st.integers(K, EXPERTS), made=st.lists(moves, max_size=25))
def test_the_number_of_blocks_changes_no_decision(
    eviction: str, scope: str, blocks: int, room: int, made: Sequence[Move]
) -> None:
    """The same requests over experts of one block and of several: the same outcomes, waits, evictions and copies, each
    of a whole expert and of its bytes."""
    one, whole = virtual(1, room, scope, eviction)
    several, parts = virtual(blocks, room, scope, eviction)
    for cache in (one, several):
        cache.fill()
    for move in made:
        assert play(one, move) == play(several, move)
    assert parts == [(eid, range(blocks), size, demand) for eid, _, size, demand in whole]
    assert {size for _, _, size, _ in whole} <= {BYTES}


def test_what_does_not_fit_a_whole_expert_stays_free() -> None:
    """Five slots for experts of two blocks hold two experts."""
    cache, _ = virtual(2, K, "global", "lru")
    cache.reshape(slots=5)
    for expert in range(4):
        cache.release(cache.acquire(0, [expert]))
        cache.check_integrity()
    assert [eid for eid in range(LAYERS * EXPERTS) if cache.is_resident(eid)] == [2, 3]
    assert cache.room(0) == 2 and len(cache.pool(0).free) == 1


def test_a_lease_speaks_of_whole_experts_of_one_block() -> None:
    """Over real slots: the segments of a lease are its experts, and each slot holds its own expert's bytes."""
    cache = build(LAYERS * K)
    for wanted in ([0, 1], [1, 2], [5, 0]):
        lease = hold(cache, 1, wanted)
        segments = {leased.segment for leased in lease.segments}
        assert segments == {(EXPERTS + expert, range(1)) for expert in wanted}
        assert all(leased.slots == (leased.slot,) for leased in lease.segments)
        cache.release(lease)
