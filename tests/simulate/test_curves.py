"""Hit rates at every size and the worth of recorded predictions: against scalar caches, one for each layer and size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.core import CacheCore
from core.cache.pool import numbered_pools
from core.errors import TraceError
from core.policy.allocation.configurator import plan_cache
from core.policy.allocation.expert_split import LayerTimes
from core.policy.eviction import policy_maker
from core.profile.trace import ArrayTrace, Chunk
from core.profile.trace.chunk import RANKED
from core.profile.trace.ranking import NONE, rankings
from core.settings.param import Choice
from core.simulate import Config
from core.simulate.curves import CurveMeter, measure_curves, routed_curves
from core.simulate.run import maker
from tests.simulate.test_simulate import request

LAYERS, EXPERTS, K = 2, 6, 2


@dataclass
class Recorded:
    parts: Sequence[Chunk]
    layers: int = LAYERS
    experts: int = EXPERTS
    top_k: int = K
    model: str = ""

    @property
    def tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    def chunks(self) -> Iterator[Chunk]:
        return iter(self.parts)


def recorded(seed: int, passes: Sequence[int], predicts: bool = True) -> Recorded:
    """Passes of so many tokens, those of one token decoded, in two chunks; predictions of either layer at any time."""
    rng = np.random.default_rng(seed)
    half, parts = len(passes) // 2, []
    for sizes in (passes[:half], passes[half:]):
        if not sizes:
            continue
        ids = rng.gumbel(size=(sum(sizes), LAYERS, EXPERTS)).argsort(-1)[..., :K].astype(np.uint8)
        rows = []
        for of in range(len(sizes)):
            for at in range(-1, LAYERS):
                for layer in range(LAYERS):
                    some = rng.permutation(EXPERTS)[: rng.integers(0, EXPERTS + 1)] if rng.random() < 0.6 else ()
                    rows += [(of, at, layer, int(expert), rng.integers(1, 4) / 4) for expert in some]
        of_sizes = np.array(sizes, np.int32)
        ranked = np.array(rows, RANKED) if predicts else None
        parts.append(Chunk(ids, of_sizes, of_sizes == 1, np.zeros(len(sizes), np.int32), ranked=ranked))
    return Recorded(parts)


def foreseen(trace: Recorded) -> Iterator[tuple[Chunk, int, list[list[int]]]]:
    """Chunk, number of the pass in it, and each layer's ranking, as somebody sees it who follows pass and layers."""
    known: dict[int, list[int]] = {}
    for chunk in trace.parts:
        for number in range(len(chunk.sizes)):
            found: list[list[int]] = []
            for at in range(-1, LAYERS):
                if at >= 0:
                    found.append(known.pop(at, []))
                rows = [] if chunk.ranked is None else chunk.ranked.tolist()
                here = [(layer, expert, score) for of, a, layer, expert, score in rows if (of, a) == (number, at)]
                for layer in {layer for layer, *_ in here}:
                    best = sorted((one for one in here if one[0] == layer), key=lambda one: -one[2])
                    known[layer] = [expert for _, expert, _ in best]
            yield chunk, number, found


seeds, lengths = st.integers(0, 2**32), st.lists(st.sampled_from([1, 1, 1, 3]), min_size=1, max_size=12)


@given(seed=seeds, passes=lengths)
def test_rankings_are_the_newest_predictions_before_a_layer(seed: int, passes: list[int]) -> None:
    trace = recorded(seed, passes)
    expected = [found for _, _, found in foreseen(trace)]
    seen = [one for _, ranked in rankings(trace) if ranked is not None for one in ranked.tolist()]
    assert [[[e for e in layer if e != NONE] for layer in one] for one in seen] == expected
    assert all(
        layer[len(e) :] == [NONE] * (EXPERTS - len(e))
        for one, x in zip(seen, expected, strict=True)
        for layer, e in zip(one, x, strict=True)
    )
    assert all(ranked is None for _, ranked in rankings(recorded(seed, passes, predicts=False)))


def scalar(policy: str, size: int) -> CacheCore[int]:
    total = LAYERS * EXPERTS
    core = CacheCore(LAYERS, EXPERTS, maker(Config(policy, size)), numbered_pools(total, [size] * LAYERS))
    for eid in core.hints.filling():
        if core.pool(eid // EXPERTS).free:
            core.admit(eid)
    return core


@pytest.mark.parametrize("policy", ["lcp", "lru"])
@settings(max_examples=15)
@given(seed=seeds, passes=lengths)
def test_curves_are_those_of_one_cache_for_each_size(policy: str, seed: int, passes: list[int]) -> None:
    trace = recorded(seed, [*passes, 1])
    hit, chosen = np.zeros((LAYERS, EXPERTS + 1)), np.zeros((LAYERS, EXPERTS))
    cached, tokens = np.zeros((LAYERS, EXPERTS + 1, EXPERTS)), 0
    cores = {size: scalar(policy, size) for size in range(K, EXPERTS + 1)}
    for chunk, number, found in foreseen(trace):
        begin, size = int(chunk.sizes[:number].sum()), int(chunk.sizes[number])
        tokens += size == 1
        for layer in range(LAYERS):
            ids = chunk.ids[begin : begin + size, layer]
            wanted = ids[0].tolist() if size == 1 else np.unique(ids).tolist()
            for slots, core in cores.items():
                core.now += size if layer == 0 else 0
                core.chosen(layer, ids)
                if size == 1:
                    for rank, expert in enumerate(found[layer]):
                        cached[layer, slots, rank] += core.is_resident(layer * EXPERTS + expert)
                    hit[layer, slots] += sum(core.is_resident(layer * EXPERTS + e) for e in wanted) / K
                request(core, layer, wanted)
            if size == 1:
                for rank, expert in enumerate(found[layer]):
                    chosen[layer, rank] += expert in wanted
    hit[:, 1] = hit[:, K] / K
    cached[:, 1] = cached[:, K] / K
    curves = measure_curves(trace, maker(Config(policy, K)))
    ranks = curves.chosen.shape[1]
    assert (curves.tokens, curves.layers, curves.experts, curves.top_k) == (tokens, LAYERS, EXPERTS, K)
    assert np.allclose(curves.hit, hit / tokens) and np.allclose(curves.hit[:, EXPERTS], 1.0)
    assert np.allclose(curves.chosen, chosen[:, :ranks] / tokens) and not chosen[:, ranks:].any()
    assert np.allclose(curves.cached, cached[..., :ranks] / tokens)


def test_sizes_between_those_replayed_are_interpolated() -> None:
    trace = recorded(3, [1] * 40)
    make = maker(Config("lcp", K))
    whole, few = measure_curves(trace, make), measure_curves(trace, make, sizes=[2, 4, 6])
    assert np.allclose(few.hit[:, [2, 4, 6]], whole.hit[:, [2, 4, 6]])
    assert np.allclose(few.hit[:, 3], (whole.hit[:, 2] + whole.hit[:, 4]) / 2)
    assert np.allclose(few.cached[:, 5], (whole.cached[:, 4] + whole.cached[:, 6]) / 2)
    assert (np.diff(whole.hit) >= 0).all()


def test_the_last_tokens_alone_and_no_predictions() -> None:
    trace = recorded(5, [1] * 10, predicts=False)
    make = maker(Config("lcp", K))
    last = measure_curves(trace, make, last=4)
    same = measure_curves(Recorded([_end(trace.parts[-1], 4)]), make)
    assert last.tokens == 4 and last.chosen.shape == (LAYERS, 0) and np.allclose(last.hit, same.hit)
    with pytest.raises(TraceError, match="no decoded token"):
        measure_curves(Recorded([_prompt(trace.parts[0])]), make)


def test_a_plan_from_a_trace() -> None:
    """Experts of the first layer are always the same, those of the second never: the budget goes there."""
    rng = np.random.default_rng(0)
    ids = np.stack([np.tile([0, 1], (300, 1)), rng.gumbel(size=(300, 12)).argsort(-1)[:, :2]], 1)
    curves = measure_curves(ArrayTrace(ids, 12), maker(Config("lcp", 2)))
    plan = plan_cache(curves, LayerTimes(0.5, 1.0, 0.1, 2.0), 12, zeta=0.05)
    assert plan.slots[1] > plan.slots[0] and plan.rounds > 0


def _end(chunk: Chunk, tokens: int) -> Chunk:
    return Chunk(chunk.ids[-tokens:], chunk.sizes[-tokens:], chunk.decode[-tokens:], chunk.rid[-tokens:])


def _prompt(chunk: Chunk) -> Any:
    return Chunk(chunk.ids, chunk.sizes, np.zeros(len(chunk.sizes), np.bool_), chunk.rid)


def routed(seed: int, tokens: int, layers: int, experts: int, k: int, skew: float = 2.0) -> npt.NDArray[Any]:
    """Ids [T, L, k], some experts asked for more often than others."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(tokens, layers, experts)) + skew * rng.random((layers, experts))
    return scores.argsort(-1)[..., ::-1][..., :k].astype(np.int16)


@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_hits_of_own_tokens_are_those_of_a_trace(skew: float) -> None:
    ids = routed(0, 60, 3, 20, 4, skew)
    found, replayed = routed_curves(ids, 20), measure_curves(ArrayTrace(ids, 20), maker(Config("lcp", 4)))
    assert found is not None and np.array_equal(found.hit, replayed.hit) and found.tokens == replayed.tokens == 60
    assert found.chosen.shape[1] == found.cached.shape[2] == 0


@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 40), missing=st.integers(0, 39), width=st.integers(1, 9))
def test_predictions_are_of_the_tokens_that_have_them(seed: int, tokens: int, missing: int, width: int) -> None:
    experts, layers, k, missing = 9, 2, 2, min(missing, tokens - 1)
    ids, rng = routed(seed, tokens, layers, experts, k), np.random.default_rng(seed)
    ranked = rng.random((tokens, layers, experts)).argsort(-1)[..., :width].astype(np.int16)
    ranked[rng.random((tokens, layers)) < 0.2, width // 2 :] = NONE
    meter = CurveMeter(layers, experts, k, policy_maker(Choice("lcp")))
    for at, one in enumerate(ids):
        meter.add(one, ranked[at] if at >= missing else None)
    replayed, part = meter.curves(), (tokens - missing) / tokens
    found = routed_curves(ids, experts, ranked[missing:])
    assert found is not None and np.array_equal(found.hit, replayed.hit)
    assert np.allclose(found.chosen * part, replayed.chosen) and np.allclose(found.cached * part, replayed.cached)


def test_it_ends_when_nobody_wants_it_any_more() -> None:
    assert routed_curves(routed(0, 50, 1, 8, 2), 8, wanted=lambda: False) is None


def test_without_tokens_there_is_nothing_to_plan_from() -> None:
    with pytest.raises(TraceError, match="no decoded token"):
        routed_curves(np.zeros((0, 2, 2), np.int16), 8)
