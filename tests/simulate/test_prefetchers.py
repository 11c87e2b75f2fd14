"""Simulated prefetching: times and recall by hand, bounds that hold, what cannot be simulated is refused in words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import SettingError, TraceError
from core.profile.trace import ArrayTrace, Chunk, FileTrace, TraceHead, TraceWriter
from core.profile.trace.chunk import RANKED
from core.profile.trace.file import save
from core.settings.registry import variants
from core.simulate import BELADY, Clock, Config, simulate
from core.simulate import prefetchers as timed_module
from core.simulate.prefetchers import ORACLE, TimedConfig, TimedResult, timed
from core.simulate.recall import recall
from core.simulate.replayed import Replayed
from core.simulate.timed_replay import TimedReplay
from core.simulate.trace_view import TraceView
from tests.selection import layered
from tests.simulate.test_engine import routes

LAYERS, EXPERTS, K, BLOB = 4, 16, 3, 1000
CLOCK = Clock(compute_ms=8.0, load_ms=1.5, expert_ms=0.4, head_ms=0.8)
ON_IDS = [v.name for v in variants("predictor") if not v.make.asks and not v.needs]


def trace(tokens: int = 60, seed: int = 0) -> ArrayTrace:
    return ArrayTrace(routes(seed, tokens, EXPERTS, LAYERS, K), EXPERTS)


def one(source: Any, config: TimedConfig, clock: Clock = CLOCK, **more: Any) -> TimedResult:
    return timed(source, [config], clock, BLOB, processes=1, **more)[0]


class Says(Replayed):
    """Names, before the first layer of every pass, what it is given."""

    def __init__(self, predictions: list[tuple[int, int, float]]) -> None:
        super().__init__()
        self.recall(np.array([(0, -1, *prediction) for prediction in predictions], RANKED))

    def follow(self, chunk: Chunk, number: int) -> None:
        """The trace says nothing."""


def test_a_token_by_hand() -> None:
    # Two layers, one expert each, 3 slots; attention 1 ms a layer, an expert 2 ms, a copy 4 ms, the head 1 ms: 7 ms of
    # computing. Both experts missing: 1, miss, +4 wait, +2, +1, miss, +4 wait, +2, +1 = 15 ms, of which 8 are stall.
    ids, clock = np.array([[[0], [0]]]), Clock(compute_ms=7.0, load_ms=4.0, expert_ms=2.0, head_ms=1.0)
    plain = one(ArrayTrace(ids, 4), TimedConfig(Config("lru", 4)), clock)
    times = [plain.per_token(name) for name in ("total_ms", "stall_ms", "compute_ms")]
    assert times == pytest.approx([15.0, 8.0, 7.0]) and plain.tpot_ms == times[0]

    def told(*predictions: tuple[int, int, float]) -> tuple[Any, ...]:
        course = TimedReplay(ArrayTrace(ids, 4), Config("lru", 4), Says(list(predictions)), clock, BLOB)
        sums = course.run()["decode"]
        return (
            sums.compute_s * 1e3,
            sums.stall_s * 1e3,
            sums.net_ms,
            sums.counts.prefetch_used,
            sums.counts.prefetch_late,
            sums.counts.prefetch_wasted,
        )

    # Layer 1's expert is named before the pass: copied from 0 to 4. Layer 0's demand of ms 1 waits until 4, then its
    # own copy until 8, done at 10; at 11 layer 1 has what it needs, done at 13, with the head 14. Stall 7. The prefetch
    # saved its copy of 4 ms and held the demand up for 3: net 1, and so much less it takes.
    assert told((1, 0, 0.9)) == pytest.approx((7.0, 7.0, 1.0, 1, 0, 0))
    # A wrong one: the demand of ms 1 waits until 4, lands at 8, 10, 11: the other copy until 15, 17, 18. Stall 11, and
    # nothing saved: net -3.
    assert told((1, 3, 0.9)) == pytest.approx((7.0, 11.0, -3.0, 0, 0, 1))
    # Layer 0's own, late: begun at 0, asked for at 1, there at 4, done at 6; layer 1's from 7 to 11, 13, 14. Net 4 - 3.
    assert told((0, 0, 0.9)) == pytest.approx((7.0, 7.0, 1.0, 0, 1, 0))


def test_without_a_predictor_it_is_the_plain_simulator() -> None:
    source = trace()
    for name in ("lru", "lfu", "plec", "none"):
        for scope, slots in (("layer", 24), ("global", 13)):
            cache = Config(name, slots, scope)
            (plain,) = simulate(source, [cache], clock=CLOCK)
            found = one(source, TimedConfig(cache))
            assert found.hit_rate == pytest.approx(plain.hit_rate)
            assert found.tpot_ms == pytest.approx(plain.tpot_ms)
            sums = found.figures
            assert sums["net_ms"] == sums["prefetch_issued"] == sums["prefetch_bytes"] == 0
            assert sums["demand_bytes"] == round((plain.misses_per_token or 0) * sums["tokens"]) * BLOB


@pytest.mark.parametrize("name", layered(ON_IDS, quick=lambda name: name in ("none", "request", "transitions")))
def test_nothing_is_faster_than_the_bound_and_bytes_add_up(name: str) -> None:
    source = trace()
    best, cache = simulate(source, [Config(BELADY, 24)])[0], Config("lru", 24)
    bound = max(CLOCK.compute_ms, (best.misses_per_token or 0.0) * CLOCK.load_ms)
    for deadline in (False, True):
        found = one(source, TimedConfig(cache, name, {}, deadline))
        assert found.tpot_ms is not None and found.tpot_ms >= bound
        assert found.per_token("compute_ms") == pytest.approx(CLOCK.compute_ms)
        sums = found.figures
        late, wasted, evicted = (sums[f"prefetch_{name}"] for name in ("late", "wasted", "evicted"))
        ended = sums["prefetch_used"] + late + wasted
        assert ended <= sums["prefetch_issued"] <= ended + 24
        assert sums["prefetch_bytes"] == ended * BLOB
        assert (sums["late_bytes"], sums["wasted_bytes"], sums["evicted_bytes"]) == (
            late * BLOB,
            wasted * BLOB,
            evicted * BLOB,
        )
    oracle = one(source, TimedConfig(cache, ORACLE))
    assert oracle.tpot_ms is not None and bound - 1e-9 <= oracle.tpot_ms <= found.tpot_ms
    assert oracle.recall_by_layer == (1.0,) * LAYERS


def test_what_was_recorded_of_a_predictor_is_replayed(tmp_path: Path) -> None:
    source = trace(60)
    (chunk,) = source.chunks()
    rows = [
        (of, layer, layer + 1, expert, 0.5)
        for of in range(60)
        for layer in range(LAYERS - 1)
        for expert in chunk.ids[of, layer + 1].tolist()
    ]  # a gate that is always right
    settings = {"width": 0, "floor": 0.0, "distance": 1}
    with TraceWriter(tmp_path / "t", TraceHead(LAYERS, EXPERTS, K, predictor=("gate", settings))) as to:
        to.write(Chunk(chunk.ids, chunk.sizes, chunk.decode, chunk.rid, ranked=np.array(rows, RANKED)))
    recorded = FileTrace(tmp_path / "t")
    found = one(recorded, TimedConfig(Config("lru", 24), "gate"))
    assert found.replayed and found.recall_by_layer[1:] == (1.0,) * (LAYERS - 1) and found.recall_by_layer[0] == 0.0
    assert (found.tpot_ms or 0) < (one(recorded, TimedConfig(Config("lru", 24))).tpot_ms or 0)
    with pytest.raises(TraceError, match="it has those of gate with width=0"):
        one(recorded, TimedConfig(Config("lru", 24), "gate", {"width": 2}))
    with pytest.raises(TraceError, match=r"it has none\. Record it: .* chat --predictor gate"):
        one(source, TimedConfig(Config("lru", 24), "gate"))


@pytest.mark.parametrize(
    ("config", "error", "why"),
    [
        (TimedConfig(Config("lru", 11)), SettingError, "11 slots are too few"),
        (TimedConfig(Config("psychic", 24)), SettingError, "no eviction called"),
        (TimedConfig(Config("lru", 24), "psychic"), SettingError, "no predictor called"),
        (TimedConfig(Config("lru", 24), "recent", {"width": -1}), SettingError, "between 0 and"),
        (TimedConfig(Config("lru", 24), "routing_path"), SettingError, "needs a profile"),
    ],
)
def test_what_cannot_be_simulated_is_said_at_first(config: TimedConfig, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        one(trace(5), config)


def test_a_view_shows_what_the_trace_has_and_refuses_the_rest() -> None:
    ids, probs = np.array([[[1, 2]], [[0, 3]]]), np.array([[[0.1, 0.6, 0.2, 0.1]], [[0.3, 0.2, 0.1, 0.4]]], np.float16)
    chunk = Chunk(ids, np.array([2], np.int32), np.array([False]), np.array([7], np.int32), probs=probs)
    view = TraceView(ArrayTrace(ids, 4), chunk, 0, slice(0, 2), None)
    assert (view.layer, view.request, list(view.ids), list(view.tokens)) == (-1, 7, [], [])
    view.reach(0)
    assert view.ids == [[1, 2], [0, 3]]
    assert view.distribution()() == pytest.approx([0.2, 0.4, 0.15, 0.25], abs=1e-3)
    assert np.array(view.weights) == pytest.approx(np.array([[0.75, 0.25], [3 / 7, 4 / 7]]), abs=1e-3)
    for ask in (lambda: view.ask([0]), lambda: view.estimate(0), view.embedding):
        with pytest.raises(TraceError, match="hidden states"):
            ask()
    with pytest.raises(TraceError, match="--record-tokens"):
        view.path()
    bare = TraceView(ArrayTrace(ids, 4), Chunk(ids, chunk.sizes, chunk.decode, chunk.rid), 0, slice(0, 2), None)
    bare.reach(0)
    with pytest.raises(TraceError, match="--record-probs"):
        bare.distribution()


@pytest.mark.long(0.1)
def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs = [TimedConfig(Config("lru", 24), name) for name in ("recent", ORACLE)]
    alone = timed(trace(40), configs, CLOCK, BLOB, processes=1)
    monkeypatch.setattr(timed_module, "SMALL", 0)
    predicted: list[str] = []
    recorded = save(trace(40), tmp_path / "t")
    assert timed(recorded, configs, CLOCK, BLOB, processes=2, say=predicted.append) == alone
    assert len(predicted) == 2


def test_pinned_experts_and_shares_of_layers_are_kept() -> None:
    sizes = (10, 3, 5, 6)
    cache = Config("lru", 24, sizes=sizes, pinned=(0, 1, 2))
    course = TimedReplay(trace(50), cache, Replayed(), CLOCK, BLOB, start="filled")
    course.run()
    expert_cache = course.expert_cache
    assert [expert_cache.pool(layer).capacity for layer in range(LAYERS)] == list(sizes)
    assert all(expert_cache.is_resident(eid) for eid in (0, 1, 2))
    expert_cache.check_integrity()


# two layers, top-2 of four experts, three tokens
IDS = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[0, 2], [0, 1]]])


def config(predictor: str, **params: Any) -> TimedConfig:
    return TimedConfig(Config("lru", 8), predictor, params)


def test_the_previous_token_s_experts_by_hand() -> None:
    """Layer 0: nothing is known at first, then {0, 1} was before {0, 2}, then {0, 2} before {0, 2}: 1 + 2 of 6. Layer
    1: {2, 3} before {2, 3}, then {2, 3} before {0, 1}: 2 of 6."""
    trace = ArrayTrace(IDS, 4)
    assert recall(trace, config("previous_token"), 2) == (pytest.approx(3 / 6), pytest.approx(2 / 6))
    # of the one named first: 0, 0 for layer 0: 2 of 6; 2, 2 for layer 1: 1 of 6
    assert recall(trace, config("previous_token"), 1) == (pytest.approx(2 / 6), pytest.approx(1 / 6))


def test_prompts_are_learnt_from_but_not_counted() -> None:
    trace = ArrayTrace(IDS, 4)
    [chunk] = trace.chunks()
    trace.chunks = lambda: iter(
        [
            Chunk(
                chunk.ids,
                np.array([2, 1], np.int32),
                np.array([False, True]),  # type: ignore[method-assign]
                np.zeros(2, np.int32),
            )
        ]
    )
    assert recall(trace, config("previous_token"), 2) == (pytest.approx(2 / 2), pytest.approx(0 / 2))


@pytest.mark.parametrize(
    "name",
    layered(
        ["previous_token", "recent", "request", "transitions", "all_next"], quick=("request", "all_next").__contains__
    ),
)
def test_it_grows_with_m_and_is_the_timed_simulator_s_at_k(name: str) -> None:
    layers, experts, k = 3, 16, 3
    trace = ArrayTrace(routes(1, 50, experts, layers, k), experts)
    own = TimedConfig(Config("lru", 24), name)
    found = [recall(trace, own, m) for m in (k, 2 * k, 3 * k)]
    for layer in range(layers):
        at = [values[layer] or 0.0 for values in found]
        assert at == sorted(at)
        assert 0 < at[0] <= 1
    [result] = timed(trace, [own], Clock(1.0, 1.0, 0.0), 100, processes=1)
    for mine, theirs in zip(found[0], result.recall_by_layer, strict=True):
        assert mine == pytest.approx(theirs)


def test_one_that_looks_at_states_is_replayed_from_what_was_recorded(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="hidden states"):
        recall(ArrayTrace(IDS, 4), config("gate"), 2)
    ranked = np.array([(0, 0, 1, 2, 0.9), (0, 0, 1, 0, 0.1), (2, 0, 1, 0, 0.8)], RANKED)
    predicted = "gate", {"width": 0, "floor": 0.0, "distance": 1}
    with TraceWriter(tmp_path / "r.trace", TraceHead(2, 4, 2, predictor=predicted)) as to:
        to.write(
            Chunk(IDS.astype(np.uint8), np.ones(3, np.int32), np.ones(3, bool), np.zeros(3, np.int32), ranked=ranked)
        )
    trace = FileTrace(tmp_path / "r.trace")
    # layer 1 of token 0 asks for 2 and 3: of (2, 0) one is right; token 1: nothing was named; token 2: the 0 is right
    assert recall(trace, config("gate"), 2) == (0.0, pytest.approx(2 / 6))
    assert recall(trace, config("gate"), 1) == (0.0, pytest.approx(2 / 6))


def test_a_layer_without_a_decoded_token_says_nothing() -> None:
    trace = ArrayTrace(IDS[:0], 4)
    assert recall(trace, config("recent"), 2) == (None, None)
