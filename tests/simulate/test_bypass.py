"""Bypass in simulated caches: the bound is what trying everything finds, and where it cannot pay it does not."""

from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.allocation.slots import shares
from core.policy.eviction import GONE, Belady
from core.profile.trace import ArrayTrace
from core.settings.registry import variants
from core.simulate import BELADY, BELADY_BYPASS, Config, Replay, simulate
from core.simulate.run import maker
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import examples, layered
from tests.simulate.belady import belady_misses
from tests.simulate.test_engine import K, routes

NAMES = [v.name for v in variants("eviction")]
seeds = st.integers(0, 2**32)


def fewest(tokens: list[list[int]], slots: int, *, admits: bool = False) -> int:
    """The fewest misses of one layer, by trying everything: after each token any experts may stay that were there or
    asked for; where it `admits` all that are asked for, these do."""

    @cache
    def after(step: int, held: frozenset[int]) -> int:
        if step == len(tokens):
            return 0
        wanted = frozenset(tokens[step])
        there, must = sorted(held | wanted), wanted if admits else frozenset()
        kept = map(frozenset, combinations(there, min(slots, len(there))))  # keeping more never hurts
        return len(wanted - held) + min(after(step + 1, some) for some in kept if some >= must)

    return after(0, frozenset())


routed = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2).map(sorted), min_size=1, max_size=8)


@given(trace=routed, slots=st.integers(2, 4))
def test_the_oracle_of_other_tests_is_the_optimum(trace: list[list[int]], slots: int) -> None:
    best = fewest(trace, slots, admits=True)
    assert belady_misses(trace, slots, warm=False) == best
    assert belady_misses(trace, slots) == best - len({e for s in trace for e in s})


def misses(ids: Any, experts: int, slots: int, scope: str = "layer", transit: int = 0) -> int:
    """Belady's, decoding."""
    replay = Replay(ArrayTrace(ids, experts), Belady, [slots], scope, transit=transit)
    return int(replay.run().misses[1].sum())


@examples(60)
@given(seed=seeds, tokens=st.integers(1, 8), slots=st.integers(2 * K, 2 * 5))
def test_the_bound_is_what_trying_everything_finds(seed: int, tokens: int, slots: int) -> None:
    ids = routes(seed, tokens, experts=5, layers=2)
    found = sum(fewest(ids[:, layer].tolist(), size) for layer, size in enumerate(shares(slots, 2)))
    assert misses(ids, 5, slots, transit=K) == found


@examples(40)
@given(seed=seeds, slots=st.integers(2 * K, 12))
def test_where_no_layers_share_the_slots_set_aside_they_are_only_lost(seed: int, slots: int) -> None:
    """Whatever such a cache keeps, one that admits everything into all of its slots can keep as well."""
    alone, pool = routes(seed, 40, experts=12, layers=1), routes(seed, 20, experts=6, layers=2)
    assert misses(alone, 12, slots) <= misses(alone, 12, slots - K, transit=K)
    assert misses(pool, 6, slots, "global") <= misses(pool, 6, slots - K, "global", transit=K)


def test_by_hand() -> None:
    """Two layers of three slots, two experts a token: 0 and 1 always, but every third token 2 and 3 in their place.

    Admitting both of these evicts one of 0 and 1 each time. Of six slots with two set aside, each layer has two, for 0
    and 1: 2 and 3 are computed and not kept."""
    ids = np.array([[[0, 1]] * 2, [[0, 1]] * 2, [[2, 3]] * 2] * 10)
    source = ArrayTrace(ids, 4)
    forced, bypass, own = simulate(
        source, [Config(BELADY, 6), Config(BELADY_BYPASS, 6, transit=2), Config("lfu", 6, transit=2)]
    )
    assert bypass.requests - bypass.hits == own.requests - own.hits == 2 * (2 + 20)
    assert forced.requests - forced.hits == 2 * (4 + 9 * 2)  # one of 2 and 3 stays, and one of 0 and 1 comes back


@pytest.mark.parametrize("name", layered(NAMES, quick=lambda name: name in ("lru", "lfu", "lcp")))
def test_no_policy_passes_the_bound(name: str) -> None:
    source = ArrayTrace(routes(3, 200, 16), 16)
    sizes = [LAYERS * K + K, 15, 30, 45]
    caches = [Config(policy, slots, transit=K) for policy in (name, BELADY_BYPASS) for slots in sizes]
    rates = [result.hit_rate or 0.0 for result in simulate(source, caches)]
    assert all(own <= best for own, best in zip(rates[:4], rates[4:], strict=True))


@pytest.mark.parametrize("name", layered(NAMES, quick=lambda name: name in ("lru", "lfu", "lcp")))
@examples(8, fewer=2)
@given(seed=seeds, slots=st.integers(LAYERS * K + K, LAYERS * EXPERTS - 1))
def test_misses_and_who_stays_are_the_engine_s_own(name: str, seed: int, slots: int) -> None:
    ids = routes(seed, 24)
    real = build(slots, "layer", name, transit=K)
    real.fill()
    make = maker(Config(name, slots))
    replay = Replay(ArrayTrace(ids, EXPERTS), make, [slots - K], start="filled", transit=K)
    base = np.arange(LAYERS)[:, None] * EXPERTS
    for now, token in enumerate(ids.tolist(), 1):
        real.core.now, missed = now, []
        for layer in range(LAYERS):
            missing = [e for e in token[layer] if not real.is_resident(layer * EXPERTS + e)]
            lease = hold(real, layer, token[layer])
            missed.append(len(missing))
            real.release(lease)
            real.check_integrity()
        cache = replay.cache
        assert cache.together(np.array(token) + base, now, cache.expert_index.layer_of).tolist() == missed
        there = np.flatnonzero(cache.policy.score != GONE).tolist()
        assert there == [eid for eid in range(LAYERS * EXPERTS) if real.is_resident(eid)]
    real.copies.link.close()
