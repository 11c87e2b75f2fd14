"""Requests have one outcome and leave one state, however they are made: leased layer by layer, looked up where all of
them are hits, or replayed after a token; for experts of one block or of several."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.address_table import AddressTable
from core.cache.copies import CacheMemory
from core.cache.expert_cache import ExpertCache
from core.cache.lease import LeasedSegment
from core.cache.requests import Requests
from core.memory.ticket import Ticket
from core.policy.allocation.slot_allocation import Placement
from core.policy.eviction import policy_maker
from core.policy.predict import Prediction
from core.settings.param import Choice
from core.settings.registry import variants
from core.simulate.virtual_clock import VirtualExperts, VirtualLink, VirtualSlots
from core.types import Outcome, Residence
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import layered

K, BYTES = 2, 60
NAMES = [v.name for v in variants("eviction")]
HOME = [-1 - eid for eid in range(LAYERS * EXPERTS)]  # no address of a slot
ids = st.integers(0, EXPERTS - 1)
token = st.lists(st.lists(ids, min_size=K, max_size=K, unique=True), min_size=LAYERS, max_size=LAYERS)


def state_of(cache: ExpertCache) -> tuple[object, ...]:
    guard, core = cache.prefetch_queue.guard, cache.core
    rates = [guard.rate(eid) for eid in range(LAYERS * EXPERTS)]
    return core.policy.score.tolist(), core.last_used.tolist(), core.tick, core.layer, rates, [*map(bool, core.table)]


def leased(cache: ExpertCache, layer: int, wanted: list[int]) -> list[LeasedSegment]:
    lease = hold(cache, layer, wanted)
    cache.release(lease)
    return lease.requests


@pytest.mark.parametrize("eviction", layered(["lru", "lfu", "lcp", "plec"], quick=lambda name: name in ("lru", "lcp")))
@given(passes=st.lists(st.lists(st.lists(ids, min_size=1, max_size=3, unique=True), max_size=LAYERS), max_size=6))
def test_a_look_up_of_all_hits_counts_as_a_lease(eviction: str, passes: list[list[list[int]]]) -> None:
    plain, looked_up = (build(LAYERS * 4, eviction=eviction) for _ in range(2))
    for one in passes:
        for cache in (plain, looked_up):
            cache.begin_pass("decode", 1)
        for layer, wanted in enumerate(one):
            requests = leased(plain, layer, wanted)
            hits = looked_up.lookup_all_hits(layer, wanted)
            if hits is None:
                leased(looked_up, layer, wanted)
            else:
                assert [one.expert for one in hits] == wanted == [one.expert for one in requests]
                assert all(one.outcome == Outcome.HIT and one.ticket is None for one in [*hits, *requests])
                assert [one.slots for one in hits] == [looked_up.core.table[layer * EXPERTS + e] for e in wanted]
        assert state_of(plain) == state_of(looked_up) and plain.counts.figures() == looked_up.counts.figures()
    looked_up.check_integrity()


def requested_twice(eviction: str = "lru") -> ExpertCache:
    """A cache whose layer 0 has 0, 1 and 2, which were hits before."""
    cache = build(LAYERS * 3, eviction=eviction)
    for _ in range(2):
        leased(cache, 0, [0, 1, 2])
    return cache


def test_a_look_up_finds_nothing_unless_all_are_hits_and_no_prefetch_is_pending() -> None:
    cache = requested_twice()
    assert cache.lookup_all_hits(0, [2, 0]) is not None
    assert cache.lookup_all_hits(0, [0, 3]) is None, "one is missing"
    assert cache.lookup_all_hits(0, [0, 0]) is None, "one twice"
    assert not cache.core.leased
    cache.prefetch([Prediction(1, 4, 0.9)], 0)
    assert cache.lookup_all_hits(0, [0, 1]) is None, "a prefetch has yet to be used or counted as wasted"
    assert requested_twice("none").lookup_all_hits(0, [0]) is None, "they are evicted after their step"


class HostTable(AddressTable):
    def __init__(self, expert_cache: ExpertCache) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            super().__init__(expert_cache, HOME, torch.device("cpu"))
        self.updates = 0

    def _update(self, landed: Collection[int]) -> None:
        super()._update(landed)
        self.updates += 1


@pytest.mark.parametrize("scope", ["layer", "global"])
@given(
    tokens=st.lists(token, min_size=1, max_size=12),
    eviction=st.sampled_from(NAMES),
    slots=st.integers(LAYERS * (K + 1), LAYERS * EXPERTS),
    bypass=st.booleans(),
)
def test_requests_after_a_token_leave_the_state_of_leases(
    scope: str, tokens: list[list[list[int]]], eviction: str, slots: int, bypass: bool
) -> None:
    transit = K if bypass and scope == "layer" and slots >= LAYERS * (K + 1) + K else 0
    host, device = (build(slots, scope, eviction, transit) for _ in range(2))
    table, blob = HostTable(device), device.copies.expert_bytes
    for routed in tokens:
        for cache in (host, device):
            cache.begin_pass("decode", 1)
        for layer, wanted in enumerate(routed):
            leased(host, layer, wanted)
        table.sync_table()
        table.check()
        addresses = table.addresses.flatten().tolist()
        found = table.request(routed)
        for cache in (host, device):
            cache.check_integrity()
        assert state_of(device) == state_of(host)
        counts = device.take_counts()
        assert counts.bypassed == host.take_counts().bypassed
        missed = 0
        for layer, (wanted, some) in enumerate(zip(routed, found, strict=True)):
            if some is None:  # all are hits
                assert all(addresses[layer * EXPERTS + one] != HOME[layer * EXPERTS + one] for one in wanted)
                continue
            assert sorted(one.expert for one in some) == sorted(wanted)
            for one in some:
                over_link = addresses[layer * EXPERTS + one.expert] == HOME[layer * EXPERTS + one.expert]
                missed += over_link
                assert one.outcome == (Outcome.MISS if over_link else Outcome.HIT)
        copied = counts.demand_bytes // blob - missed
        assert 0 <= copied <= sum(map(len, routed)) and counts.demand_bytes == (missed + copied) * blob
    for cache in (host, device):
        cache.copies.link.close()


def test_a_copy_is_read_in_its_slot_by_the_token_after_the_next() -> None:
    cache = build(LAYERS * 3)
    table, outcomes = HostTable(cache), []
    for _ in range(4):
        cache.begin_pass("decode", 1)
        table.sync_table()
        first = table.request([[0, 1], [0, 1], [0, 1]])[0]
        outcomes.append([one.outcome for one in first] if first is not None else [Outcome.HIT] * 2)
    assert outcomes == [[Outcome.MISS] * 2] * 2 + [[Outcome.HIT] * 2] * 2
    assert table.updates == 4


OFTEN = {*itertools.product(("lru", "lfu", "lcp", "plec", "none"), ("layer",)), ("plec", "global")}


class Move(NamedTuple):
    """One event of a cache: a pass over one layer, predictions made in it, and later another size or a reservation."""

    layer: int
    wanted: list[int]
    predicted: list[tuple[int, int]]
    seconds: float
    capacity: int  # experts per layer from now on; 0 = as before
    reserves: bool


moves = st.builds(
    Move,
    st.integers(0, LAYERS - 1),
    st.lists(ids, min_size=1, max_size=K, unique=True),
    st.lists(st.tuples(st.integers(0, LAYERS - 1), ids), max_size=4, unique=True),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0, 0, 0, K, K + 1, EXPERTS]),
    st.booleans(),
)


def virtual(blocks: int, capacity: int, scope: str, eviction: str) -> tuple[ExpertCache, list[tuple[Any, ...]]]:
    """A cache with `capacity` experts per layer on a virtual clock, and a list of its copies. Prefetches evict other
    experts, also where these have several blocks."""
    copied: list[tuple[Any, ...]] = []

    def fetch(ticket: Ticket) -> None:
        assert len({slot.index for slot in ticket.slots}) == blocks, "a slot for each block"
        copied.append((*ticket.segment, ticket.bytes, ticket.demand))

    placement = replace(Placement.even(LAYERS, EXPERTS, K, scope), blocks=blocks)
    memory = CacheMemory(VirtualSlots(), VirtualExperts(BYTES), VirtualLink(0.5, fetch))
    cache = ExpertCache(placement, LAYERS * capacity * blocks, policy_maker(Choice(eviction)), memory)
    cache.requests = Requests(cache.core, cache.copies, to_buffer=False)
    return cache, copied


def place(cache: ExpertCache, eid: int) -> Residence:
    held = len(cache.core.table[eid])
    if not held:
        return Residence.DISK if cache.store.origin(eid) == "disk" else Residence.HOST
    if eid in cache.copies.in_flight():
        return Residence.IN_FLIGHT
    return Residence.RESIDENT if held == cache.core.blocks else Residence.PART


def play(cache: ExpertCache, move: Move) -> list[tuple[Any, ...]]:
    """Make one move -> the outcome of every request, and the places and counts afterwards."""
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
    if move.capacity:
        cache.reshape(slots=LAYERS * move.capacity * blocks)
        cache.check_integrity()
    if move.reserves:
        link.advance(1e3)
        reservation = cache.reserve_slots(K)
        other = cache.acquire(move.layer, [0, 1])
        seen.append(tuple(leased.outcome for leased in other.segments))
        cache.release(other)
        cache.restore(reservation, lambda: False)
        cache.check_integrity()
    assert list(cache.places()) == [place(cache, eid) for eid in range(LAYERS * EXPERTS)]
    return [*seen, (cache.places(), cache.capacity_for(move.layer), cache.counts.figures())]


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    ("eviction", "scope"), layered(itertools.product(NAMES, ("layer", "global")), quick=lambda case: case in OFTEN)
)
@settings(max_examples=15)
@given(blocks=st.sampled_from([2, 3]), capacity=st.integers(K, EXPERTS), made=st.lists(moves, max_size=25))
def test_blocks_decide_nothing(eviction: str, scope: str, blocks: int, capacity: int, made: Sequence[Move]) -> None:
    """The same requests over experts of one block and of several: the same outcomes, waits, evictions and copies, each
    of a whole expert and of its bytes."""
    one, whole = virtual(1, capacity, scope, eviction)
    several, parts = virtual(blocks, capacity, scope, eviction)
    for cache in (one, several):
        cache.fill()
    for move in made:
        assert play(one, move) == play(several, move)
    assert parts == [(eid, range(blocks), size, demand) for eid, _, size, demand in whole]
    assert {size for _, _, size, _ in whole} <= {BYTES}


def test_slots_too_few_for_a_whole_expert_stay_free() -> None:
    """Five slots for experts of two blocks hold two experts."""
    cache, _ = virtual(2, K, "global", "lru")
    cache.reshape(slots=5)
    for expert in range(4):
        cache.release(cache.acquire(0, [expert]))
        cache.check_integrity()
    assert [eid for eid in range(LAYERS * EXPERTS) if cache.is_resident(eid)] == [2, 3]
    assert cache.capacity_for(0) == 2 and len(cache.pool(0).free) == 1


def test_the_segments_of_a_lease_are_its_experts() -> None:
    """Over real slots, each of which holds its own expert's bytes."""
    cache = build(LAYERS * K)
    for wanted in ([0, 1], [1, 2], [5, 0]):
        lease = hold(cache, 1, wanted)
        assert {leased.segment for leased in lease.segments} == {(EXPERTS + expert, range(1)) for expert in wanted}
        assert all(leased.slots == (leased.slot,) for leased in lease.segments)
        cache.release(lease)
