"""Experts of which a layer keeps the top: which are cut or evicted; a layer never keeps more than its slots."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.core import CacheCore
from core.types import Segment
from tests.cache.split_core import BLOCKS, EXPERTS, LAYERS, NAMES, K, lengths, policy, prompt, split_core, token
from tests.selection import examples, layered


def test_experts_longer_than_a_top_are_cut_before_any_is_evicted() -> None:
    """One layer of four experts of four blocks, with four blocks and a buffer of four; tops of two."""
    lost: list[tuple[int, int]] = []
    core = split_core([4], [2], experts=4, buffer=4, lost=lost)
    assert token(core, 0, [0]) == [Segment(0, range(4))] and lengths(core) == {0: 4}  # no other needs these slots
    assert token(core, 0, [1]) == [Segment(1, range(4))]
    assert lengths(core) == {0: 2, 1: 2} and lost == [(0, 2), (1, 2)]
    assert token(core, 0, [2]) == [Segment(2, range(4))]
    assert lengths(core) == {1: 2, 2: 2} and lost[2:] == [(2, 2), (0, 0)]  # then the least recently used one is evicted
    assert token(core, 0, [1]) == [Segment(1, range(2, 4))]  # its top was there
    assert lengths(core) == {1: 2, 2: 2} and lost[4:] == [(1, 2)]
    assert len(core.transit) == 4


def test_scores_decide_which_tops_stay() -> None:
    """LCP: the newcomer was used once, the others more often; it is evicted itself."""
    core = split_core([4], [2], "lcp", experts=4, buffer=4)
    for expert in (0, 1, 0, 1):
        token(core, 0, [expert])
    token(core, 0, [2])
    assert lengths(core) == {0: 2, 1: 2}


def test_a_prompt_copies_what_is_missing_once_and_leaves_tops() -> None:
    """Four blocks and a buffer of two experts; all eight experts are requested: none but tops lose their slots."""
    lost: list[tuple[int, int]] = []
    core = split_core([4], [1], experts=8, buffer=8, lost=lost)
    for expert in range(4):
        token(core, 0, [expert])
    token(core, 0, [6])
    assert lengths(core) == {1: 1, 2: 1, 3: 1, 6: 1}
    lost.clear()
    copied = prompt(core, 0, range(8))
    assert copied == [Segment(eid, range(eid in (1, 2, 3, 6), 4)) for eid in (1, 2, 3, 6, 0, 4, 5, 7)]
    assert lengths(core) == {0: 1, 4: 1, 5: 1, 7: 1}, "the most recently used: residents come first"
    assert lost.count((6, 0)) == 1 and sum(not kept for _, kept in lost) == 4, "four were evicted for four"


def test_whole_residents_of_a_layer_are_used_before_they_are_cut() -> None:
    core = split_core([12], [1], experts=8, buffer=8)
    prompt(core, 0, [5, 6, 7])
    prompt(core, 0, [0, 1])
    assert lengths(core) == {0: 4, 1: 4, 5: 1, 6: 1, 7: 1}
    bottoms = [Segment(eid, range(1, 4)) for eid in (5, 6, 7)]
    assert prompt(core, 0, [5, 6, 7, 0, 1, 2]) == [*bottoms, Segment(2, range(4))]


def test_the_buffer_is_no_part_of_the_cache() -> None:
    core = split_core([4], [2], experts=4, buffer=4)
    token(core, 0, [0])
    token(core, 0, [1])
    assert core.buffer(3) is not None and core.buffer(0) is None  # whole, and then there is no room for a bottom
    assert lengths(core) == {0: 2, 1: 2, 3: 4}
    core.check_integrity()
    core.arrive(0, [1])  # wasted
    assert lengths(core) == {0: 2, 1: 2} and len(core.transit) == 4
    bottom = core.buffer(0)
    assert bottom is not None and core.table[0][2:] == bottom
    assert token(core, 0, [0]) == [] and lengths(core) == {0: 2, 1: 2}
    assert core.buffer(3) is not None
    assert token(core, 0, [3]) == [] and lengths(core) == {0: 2, 3: 2}  # a used expert is in the cache
    assert core.buffer(2) is not None
    assert token(core, 0, [0]) == [Segment(0, range(2, 4))]  # a demand goes before a prefetch
    assert lengths(core) == {0: 2, 3: 2} and not core.held.buffered


def test_another_split_moves_nothing() -> None:
    core = split_core([8], [4], experts=4, buffer=4)
    token(core, 0, [0])
    token(core, 0, [1])
    core.split([1])
    assert lengths(core) == {0: 4, 1: 4}
    token(core, 0, [2])
    assert lengths(core) == {0: 1, 1: 1, 2: 4}  # two were cut for its four blocks, and two blocks are left over
    core.split([4])
    before = lengths(core)
    core.check_integrity()
    assert lengths(core) == before
    assert token(core, 0, [0]) == [Segment(0, range(1, 4))]


def test_a_layer_may_keep_nothing() -> None:
    """Tops of no block: experts are evicted whole."""
    core = split_core([0], [0], experts=4, buffer=8)
    assert token(core, 0, [0, 1]) == [Segment(0, range(4)), Segment(1, range(4))] and lengths(core) == {}
    assert core.buffer(2) is not None and token(core, 0, [2]) == []
    assert lengths(core) == {}


choices = st.lists(st.integers(0, EXPERTS - 1), min_size=K, max_size=K, unique=True)
turns = st.lists(st.lists(choices, min_size=LAYERS, max_size=LAYERS), max_size=30)


@pytest.mark.parametrize("name", layered(NAMES, quick=lambda name: name in ("lru", "lcp", "none", "random")))
@settings(max_examples=15)
@given(made=turns, room=st.integers(K, EXPERTS), blocks=st.sampled_from([1, 3]), bypass=st.booleans())
def test_tops_as_long_as_experts_are_the_cache_of_whole_experts(
    name: str, made: Sequence[Sequence[list[int]]], room: int, blocks: int, bypass: bool
) -> None:
    """Blocks, splitting to whole experts and back: the same copies and the same evictions in the same order."""
    seen: list[list[object]] = []
    for parts, splits in ((1, False), (blocks, True)):
        events: list[object] = []
        lost: list[tuple[int, int]] = []
        core = split_core(
            [room * parts] * LAYERS, [parts] * LAYERS, name, blocks=parts, buffer=K * parts * bypass, lost=lost
        )
        for wanted in made:
            core.now += 1
            if splits:
                core.split([parts] * LAYERS)
            for layer, experts in enumerate(wanted):
                events += [segment.eid for segment in token(core, layer, experts)]
                events += [(eid, kept) for eid, kept in lost]
                lost.clear()
        seen.append([*events, sorted(lengths(core))])
        assert all(length == parts for length in lengths(core).values())
    assert seen[0] == seen[1]


class Move(NamedTuple):
    """One event: a token, with prefetches in each layer, then maybe other tops, slots, policy or pins."""

    wanted: list[list[int]]
    ahead: list[list[int]]
    tops: list[int] | None
    capacities: list[int] | None
    name: str | None
    pins: list[int] | None


def maybe(strategy: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[int] | None]:
    return st.none() | st.none() | st.none() | strategy


each = st.lists(st.integers(0, BLOCKS), min_size=LAYERS, max_size=LAYERS)
moves = st.builds(
    Move,
    st.lists(choices, min_size=LAYERS, max_size=LAYERS),
    st.lists(st.lists(st.integers(0, LAYERS * EXPERTS - 1), max_size=4, unique=True), min_size=LAYERS, max_size=LAYERS),
    maybe(each),
    maybe(st.lists(st.integers(0, EXPERTS * BLOCKS), min_size=LAYERS, max_size=LAYERS)),
    st.none() | st.none() | st.none() | st.sampled_from(NAMES),
    maybe(st.lists(st.integers(0, LAYERS * EXPERTS - 1), max_size=2, unique=True)),
)


def check(core: CacheCore[int], capacities: Sequence[int], buffer: int) -> None:
    """Every block within its layer's slots or the buffer, and every slot in one place."""
    core.check_integrity()
    sizes = core.held.sizes()
    for layer, capacity in enumerate(capacities):
        kept = sum(size for eid, size in sizes.items() if eid // EXPERTS == layer)
        assert kept <= capacity == core.pools[layer].capacity
    buffered = sum(BLOCKS - had for had in core.held.buffered.values())
    assert buffered + len(core.transit) == buffer
    slots = [slot for held in core.table for slot in held]
    slots += [slot for pool in core.pools for slot in pool.free] + core.transit
    assert len(slots) == len(set(slots)) == sum(capacities) + buffer


@examples(100)
@given(
    name=st.sampled_from([name for name in NAMES if name != "none"]),
    capacities=st.lists(st.integers(0, EXPERTS * BLOCKS), min_size=LAYERS, max_size=LAYERS),
    tops=st.lists(st.integers(1, BLOCKS), min_size=LAYERS, max_size=LAYERS),
    more=st.integers(0, BLOCKS),
    made=st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.lists(st.integers(0, EXPERTS - 1), min_size=1, unique=True)),
        max_size=20,
    ),
)
def test_tokens_and_prompts_leave_the_tops_of_as_many_experts_as_there_is_room_for(
    name: str, capacities: list[int], tops: list[int], more: int, made: Sequence[tuple[int, list[int]]]
) -> None:
    core, seen = split_core(capacities, tops, name, buffer=K * BLOCKS + more), [set[int]() for _ in range(LAYERS)]
    for layer, wanted in made:
        core.now += len(wanted)
        (token if len(wanted) <= K else prompt)(core, layer, wanted)
        seen[layer] |= {*wanted}
        kept = [eid for eid in lengths(core) if eid // EXPERTS == layer]
        assert len(kept) >= min(len(seen[layer]), capacities[layer] // tops[layer])


@examples(150)
@given(
    capacities=st.lists(st.integers(0, EXPERTS * BLOCKS), min_size=LAYERS, max_size=LAYERS),
    tops=each,
    more=st.integers(0, 2 * BLOCKS),
    made=st.lists(moves, max_size=20),
)
def test_layers_keep_to_their_slots(capacities: list[int], tops: list[int], more: int, made: Sequence[Move]) -> None:
    buffer, spare = K * BLOCKS + more, itertools.count(10_000)
    core = split_core(capacities, tops, buffer=buffer)
    for move in made:
        core.now += 1
        for layer, (wanted, ahead) in enumerate(zip(move.wanted, move.ahead, strict=True)):
            eids = [layer * EXPERTS + expert for expert in wanted]
            core.arrive(layer, eids)
            for eid in core.lease(layer, eids):
                assert core.admit_requested(eid) is not None
            whole = {eid: core.table[eid] for eid in eids}
            assert all(len(slots) == BLOCKS for slots in whole.values())
            for eid in ahead:
                if len(core.table[eid]) < BLOCKS:
                    before = core.held.sizes()
                    core.buffer(eid)
                    assert core.held.sizes() == before, "a prefetch into the buffer evicted an expert"
            assert all(core.table[eid] == slots for eid, slots in whole.items())
            core.release(eids)
            check(core, capacities, buffer)
        if move.pins is not None:
            core.pinned = frozenset(move.pins)
        if move.tops is not None:
            before = lengths(core)
            core.split(move.tops)
            assert lengths(core) == before
        if move.capacities is not None:
            core.resize(move.capacities, buffer, lambda at: next(spare), lambda slot: None)
            capacities = move.capacities
        if move.name is not None:
            left = core.rebuild(policy(move.name), capacities)
            assert not left
        check(core, capacities, buffer)
    core.evict_all()
    assert lengths(core) == {} and len(core.transit) == buffer
