"""Many configurations at once: rates against independent counting and the scalar core, bounds that hold, processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.core import CacheCore
from core.cache.lease import in_waves
from core.cache.pool import numbered_pools
from core.errors import SettingError
from core.policy.allocation.slots import shares
from core.policy.eviction import GONE
from core.policy.hints import Hints
from core.profile.trace import ArrayTrace, Chunk, FileTrace, TraceHead, TraceWriter
from core.settings.registry import variants
from core.simulate import BELADY, Clock, Config, Replay, simulate
from core.simulate.run import maker
from tests.selection import by_turns, examples
from tests.simulate.belady import belady_misses
from tests.simulate.test_engine import routes

NAMES = [v.name for v in variants("eviction")]
LAYERS, EXPERTS, K = 3, 16, 3


def trace(tokens: int = 300, seed: int = 0) -> tuple[ArrayTrace, Any]:
    ids = routes(seed, tokens, EXPERTS, LAYERS, K)
    return ArrayTrace(ids, EXPERTS), ids


def lru_hits(ids: Any, slots: int) -> int:
    """One layer [tokens, k], counted by hand: hits first, then each miss takes the oldest not needed now."""
    order: list[int] = []
    hits = 0
    for token in ids.tolist():
        hit = [e for e in token if e in order]
        hits += len(hit)
        for e in hit:
            order.remove(e)
            order.append(e)
        for e in [e for e in token if e not in hit]:
            if len(order) == slots:
                order.remove(next(o for o in order if o not in token))
            order.append(e)
    return hits


def test_rates_against_independent_counting() -> None:
    source, ids = trace()
    lru, least, best = simulate(source, [Config("lru", 5 * LAYERS), Config("none", 9), Config(BELADY, 5 * LAYERS)])
    counted = [lru_hits(ids[:, layer], 5) for layer in range(LAYERS)]
    assert (lru.requests, lru.hits) == (300 * LAYERS * K, sum(counted))
    assert lru.layer_hit_rate == tuple(hits / (300 * K) for hits in counted)
    assert np.mean(lru.rank_hit_rate) == pytest.approx(lru.hit_rate) and len(lru.rank_hit_rate) == K
    assert lru.hit_rate == lru.hits / lru.requests and lru.prefill_hit_rate is None
    assert lru.misses_per_token == pytest.approx((lru.requests - lru.hits) / 300)
    assert least.hit_rate == 0.0
    misses = [belady_misses(ids[:, layer].tolist(), 5, warm=False) for layer in range(LAYERS)]
    assert best.requests - best.hits == sum(misses)
    assert best.compulsory == sum(len(np.unique(ids[:, layer])) for layer in range(LAYERS))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_no_policy_beats_belady_and_more_slots_never_hurt_it(scope: str) -> None:
    source, _ = trace(100, seed=3)
    sizes = [9, 20, 33, 47]
    results = simulate(source, [Config(n, s, scope) for n in [*NAMES, BELADY] for s in sizes])
    rate = {(r.config.policy, r.config.slots): r.hit_rate or 0.0 for r in results}
    for slots in sizes:
        assert all(rate[name, slots] <= rate[BELADY, slots] for name in NAMES)
    assert sorted(rate[BELADY, s] for s in sizes) == [rate[BELADY, s] for s in sizes]
    assert rate["lru", 47] > rate["none", 47] == 0


def test_everything_resident_misses_what_is_compulsory() -> None:
    source, _ = trace()
    total = LAYERS * EXPERTS
    for name in NAMES:
        if name != "none":
            empty, filled = (simulate(source, [Config(name, total)], start=s)[0] for s in ("empty", "filled"))
            assert empty.requests - empty.hits == empty.compulsory
            assert filled.hit_rate == 1.0


def test_prompts_are_counted_apart(tmp_path: Path) -> None:
    ids = routes(2, 60, EXPERTS, LAYERS, K).astype(np.uint8)
    sizes = np.array([20, *[1] * 10, 19, *[1] * 11], np.int32)
    with TraceWriter(tmp_path / "t", TraceHead(LAYERS, EXPERTS, K)) as writer:
        writer.write(Chunk(ids, sizes, sizes == 1, np.zeros(len(sizes), np.int32)))
    result = simulate(FileTrace(tmp_path / "t"), [Config("lru", 20)])[0]
    assert result.requests == 21 * LAYERS * K
    assert result.prefill_hit_rate is not None and 0 < result.prefill_hit_rate < 1
    best = simulate(FileTrace(tmp_path / "t"), [Config(BELADY, 20)])[0]
    assert (best.hit_rate or 0) >= (result.hit_rate or 0)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_hits_by_the_router_s_order(scope: str) -> None:
    """The first choice is always 0, the second alternates between 1 and 2, the third is new every time."""
    ids = np.array([[[0, 1 + t % 2, 3 + t]] * 2 for t in range(8)])
    (one,) = simulate(ArrayTrace(ids, 12), [Config("lru", 2 * 5, scope)])
    assert one.rank_hit_rate == (7 / 8, 6 / 8, 0.0)


def test_repeated_ids_ask_once() -> None:
    ids = np.array([[[0, 1, 1]], [[1, 1, 1]], [[2, 3, 2]], [[0, 0, 1]]])
    result = simulate(ArrayTrace(ids, 4), [Config("lru", 3)])[0]
    assert (result.requests, result.hits) == (2 + 1 + 2 + 2, 0 + 1 + 0 + 1)  # 0 made room for 3: only 1 is there


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Config("psychic", 9), "no eviction called 'psychic'"),
        (Config("lru", 8), "need at least 9"),
        (Config("lru", 2, "global"), "needs at least 3"),
        (Config("lcp", 9, params={"rho": 2.0}), "between 0.01 and 0.99"),
    ],
)
def test_what_cannot_be_simulated_is_said(config: Config, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        simulate(trace(5)[0], [config])
    with pytest.raises(SettingError, match="empty or filled"):
        simulate(trace(5)[0], [], start="half")


def test_the_clock_by_hand() -> None:
    clock = Clock(compute_ms=10.0, load_ms=3.0, expert_ms=1.0)
    assert clock.stall_ms(4, 0) == 0
    assert clock.stall_ms(4, 1) == 0  # three residents take as long as the copy
    assert clock.stall_ms(4, 2) == 1 + 2  # ready at 2, copies land at 3 and 6: waits from 2 to 3, from 4 to 6
    assert clock.stall_ms(4, 4) == 3 + 2 + 2 + 2
    # Two layers, ten tokens: nine misses of none and one of two; all of one: (9 x 0 + 3) / 10 a token.
    assert clock.tpot_ms(np.array([[9, 0, 1, 0, 0], [0, 10, 0, 0, 0]])) == pytest.approx(10.3)
    # Half a millisecond a miss, spent while the next copy is under way: two misses wait 1 and then 3 + 1.5 to 6.
    busy = Clock(compute_ms=10.0, load_ms=3.0, expert_ms=1.0, miss_ms=0.5)
    assert busy.stall_ms(4, 2) == 1 + 1.5
    assert busy.tpot_ms(np.array([[9, 0, 1, 0, 0], [0, 10, 0, 0, 0]])) == pytest.approx(10 + (2.5 + 12 * 0.5) / 10)
    source, _ = trace()
    slow, fast = (simulate(source, [Config("lru", 15)], clock=Clock(5.0, ms, 0.1))[0] for ms in (2.0, 0.1))
    assert slow.tpot_ms is not None and fast.tpot_ms is not None and slow.tpot_ms > fast.tpot_ms >= 5.0


FEW = 7  # experts
TOTAL = LAYERS * FEW
TOP_K = 2


def told(usual: list[int], pinned: Sequence[int]) -> Hints:
    hints = Hints(LAYERS, FEW)
    hints.profile(usual, pinned)
    return hints


def scalar(name: str, scope: str, slots: int, usual: list[int], pinned: Sequence[int], transit: int) -> CacheCore[int]:
    """A core that is filled as the simulator's is: pinned experts, then each layer's most used ones."""
    pools = numbered_pools(TOTAL, shares(slots, LAYERS) if scope == "layer" else [slots])
    core = CacheCore(LAYERS, FEW, maker(Config(name, slots)), pools, told(usual, pinned))
    core.pinned, core.transit = frozenset(pinned), list(range(transit))
    for eid in [*pinned, *(core.hints.filling() if core.policy.retains else ())]:
        if not core.is_resident(eid) and core.pool(eid // FEW).free:
            core.admit(eid)
    return core


def request(core: CacheCore[int], layer: int, wanted: Sequence[int]) -> int:
    """`layer` requests experts, in waves if they do not fit -> misses."""
    misses = 0

    def acquire(group: Sequence[int]) -> Sequence[int]:
        nonlocal misses
        eids = [layer * core.experts + expert for expert in group]
        missing = core.lease(layer, eids)
        for eid in missing:
            assert core.admit_requested(eid) is not None
        misses += len(missing)
        return eids

    for _ in in_waves(core, layer, wanted, acquire, core.release):
        assert all(core.is_resident(eid) for eid in core.leased)
    core.check_integrity()
    return misses


@pytest.mark.parametrize(("name", "scope"), by_turns(NAMES, ("layer", "global")))
@examples(12, fewer=3)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(LAYERS * (TOP_K + 1), TOTAL), min_size=1, max_size=3),
    pinned=st.lists(st.integers(0, FEW - 1), max_size=LAYERS),
    passes=st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=30),
    transit=st.sampled_from([0, 1, TOP_K]),
)
def test_caches_side_by_side_do_what_the_scalar_core_does_for_each(
    name: str, scope: str, seed: int, sizes: list[int], pinned: list[int], passes: list[int], transit: int
) -> None:
    random = np.random.default_rng(seed)
    usual = random.integers(0, 9, TOTAL).tolist()
    pins = [layer * FEW + expert for layer, expert in enumerate(pinned)]  # at most one a layer
    liked = random.gumbel(size=(LAYERS, FEW))
    ids = np.argsort(-(liked + random.gumbel(size=(sum(passes), LAYERS, FEW))), 2)[..., :TOP_K]
    cores = [scalar(name, scope, slots, usual, pins, transit) for slots in sizes]
    make, hints = maker(Config(name, sizes[0])), told(usual, pins)
    replay = Replay(ArrayTrace(ids, FEW), make, sizes, scope, "filled", hints, transit)
    at = 0
    for size in passes:
        rows = ids[at : at + size]
        chunk = Chunk(rows.astype(np.uint8), np.array([size], np.int32), np.array([size == 1]), np.zeros(1, np.int32))
        _, missed = replay.feed(chunk)
        expected = []
        for core in cores:
            core.now = at + size
            for layer in range(LAYERS):
                core.chosen(layer, rows[:, layer])
                wanted = rows[0, layer].tolist() if size == 1 else np.unique(rows[:, layer]).tolist()
                expected.append(request(core, layer, wanted))
        assert missed[0].tolist() == expected
        resident = [core.is_resident(eid) for core in cores for eid in range(TOTAL)]
        assert (replay.cache.policy.score != GONE).tolist() == resident
        at += size
