"""Bypass in simulated caches: the bound is what trying everything finds, and where it cannot pay it does not."""

import math
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.measure.evaluate.tally import FEWEST, RUN, ModeTotals
from core.policy.allocation.slots import shares
from core.policy.eviction import GONE, Belady
from core.profile.trace import ArrayTrace
from core.settings.registry import variants
from core.simulate import BELADY, BELADY_BYPASS, Clock, Config, Replay, simulate
from core.simulate.blocks import BLOCKS, Block, block_of, gain
from core.simulate.prefetchers import TimedConfig, timed
from core.simulate.run import maker
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.profile.passes import routed, step
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


requested = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2).map(sorted), min_size=1, max_size=8)


@given(trace=requested, slots=st.integers(2, 4))
def test_the_oracle_of_other_tests_is_the_optimum(trace: list[list[int]], slots: int) -> None:
    best = fewest(trace, slots, admits=True)
    assert belady_misses(trace, slots, warm=False) == best
    assert belady_misses(trace, slots) == best - len({e for s in trace for e in s})


def misses(ids: Any, experts: int, slots: int, scope: str = "layer", transit: int = 0) -> int:
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


CLOCK = Clock(4.0, 1.0, 0.1, 0.0)


def test_parts_are_of_equal_length_and_every_token_is_in_one() -> None:
    at = block_of(np.arange(100), 100)
    assert np.bincount(at).tolist() == [5] * BLOCKS
    assert block_of(np.arange(3), 3).tolist() == [0, 6, 13]


def test_a_gain_and_its_error_by_hand() -> None:
    base = [Block(10, cost) for cost in (5.0, 6.0, 7.0, 8.0, 9.0)]
    less = [Block(10, cost) for cost in (4.0, 4.0, 6.0, 6.0, 8.0)]  # 1, 2, 1, 2, 1 less
    mean, error = gain(less, base) or (0.0, 0.0)
    assert mean == pytest.approx(1.4)
    assert error == pytest.approx(math.sqrt(sum((one - 1.4) ** 2 for one in (1, 2, 1, 2, 1)) / 4 / 5))
    assert gain(base, less) == pytest.approx((-1.4, error))
    assert gain(less[:4], base[:4]) is None, "of four parts no error is told"
    assert gain(less, [*base[:4], Block(9, 9.0)]) is None, "not of the same tokens"
    heavy = [*(Block(1, 1.0) for _ in range(4)), Block(96, 0.0)]
    assert (gain(heavy, [Block(one.tokens, 2.0) for one in heavy]) or (0.0,))[0] == pytest.approx(1.96)


def test_the_parts_of_a_replay_add_up_to_its_result() -> None:
    source = ArrayTrace(routed(47), 9)
    (plain,) = simulate(source, [Config("lru", 9)], clock=CLOCK, processes=1)
    (counted,) = simulate(source, [Config("lru", 9)], processes=1)
    (ahead,) = timed(source, [TimedConfig(Config("lru", 9))], CLOCK, 100, processes=1)
    for found, whole in ((plain, plain.tpot_ms), (counted, counted.misses_per_token), (ahead, ahead.tpot_ms)):
        assert sum(one.tokens for one in found.blocks) == 47 and len(found.blocks) == BLOCKS
        assert sum(one.tokens * one.cost for one in found.blocks) / 47 == pytest.approx(whole)


def test_the_error_of_a_mode_s_time_comes_from_runs_of_passes() -> None:
    tally, rng = ModeTotals(), np.random.default_rng(0)
    took = rng.normal(10.0, 1.0, RUN * FEWEST + 3)
    for at, ms in enumerate(took):
        if at == RUN * FEWEST:
            runs = took[:at].reshape(FEWEST, RUN).mean(1)
            assert tally.total_ms_se == pytest.approx(runs.std(ddof=1) / math.sqrt(FEWEST))
        elif at < RUN * FEWEST:
            assert tally.total_ms_se is None
        one = step(routed(1)[0][:, None])
        one.total_ms = float(ms)
        tally(one)
    assert tally.total_ms_se == pytest.approx(runs.std(ddof=1) / math.sqrt(FEWEST)), (
        "a run that is not whole is left out"
    )
