"""The regret meter: nothing passes its bound, the bound can be reached, and the shadows are the simulator's caches."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.engine import Engine
from core.profile.trace import ArrayTrace, Chunk
from core.settings.config import Settings
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.simulate import Config, Replay
from core.simulate.regret import Setup, Shadows
from core.simulate.run import maker
from tests.selection import examples, layered
from tests.simulate.test_engine import QUESTIONS, restart

POLICIES = {v.name: dict[str, int | float | bool | str]() for v in variants("eviction")}
LAYERS, EXPERTS, K = 3, 8, 2


def passes(sizes: list[int], seed: int, layers: int = LAYERS, experts: int = EXPERTS, k: int = K) -> Chunk:
    """Passes of so many tokens each, with favourites and some memory; those of one token are decoded."""
    random, n = np.random.default_rng(seed), sum(sizes)
    liked, noise = random.gumbel(size=(layers, experts)), random.gumbel(size=(n, layers, experts))
    noise[1:] += noise[:-1]
    ids = np.argsort(-(liked + noise), 2)[..., :k].astype(np.uint8)
    of = np.array(sizes, np.int32)
    return Chunk(ids, of, of == 1, np.zeros(len(of), np.int32))


def fed(shadows: Shadows, chunk: Chunk) -> Shadows:
    shadows.feed(chunk, np.zeros(len(chunk.sizes)), np.ones(len(chunk.sizes)))
    return shadows


sizes = st.lists(st.sampled_from([1, 1, 1, 1, 1, 2, 5]), min_size=1, max_size=40)


@examples(60)
@given(
    before=sizes,
    sizes=sizes,
    seed=st.integers(0, 2**32),
    scope=st.sampled_from(["layer", "global"]),
    slots=st.integers(LAYERS * K, LAYERS * EXPERTS),
    window=st.integers(1, 40),
    transit=st.sampled_from([0, 0, K]),
)
def test_no_policy_passes_the_bound(
    before: list[int], sizes: list[int], seed: int, scope: str, slots: int, window: int, transit: int
) -> None:
    shadows = Shadows(Setup(LAYERS, EXPERTS, K, slots + transit, scope, POLICIES, transit=transit), window)
    shadows.warm(passes(before, seed + 1))
    report = fed(shadows, passes(sizes, seed)).report()
    decoded = min(window, sizes.count(1))
    if not decoded:
        assert report is None
        return
    assert report is not None
    assert report.tokens == decoded
    assert all(rate <= report.belady <= 1.0 for rate in report.rates.values())
    if slots == LAYERS * EXPERTS:
        assert report.belady == 1.0


def most(items: list[tuple[bool, frozenset[int]]], capacity: int, universe: frozenset[int]) -> int:
    """The most hits by trying everything: any first contents, and after each request any of what is there."""

    def kept(there: frozenset[int], needed: frozenset[int]) -> list[frozenset[int]]:
        free = sorted(there - needed)
        room = min(capacity - len(needed), len(free))
        return [needed | set(some) for some in combinations(free, room)]  # type: ignore[misc]

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(items):
            return 0
        decode, wanted = items[at]
        if not decode:
            return max(best(at + 1, frozenset(some)) for some in kept(held | wanted, frozenset()))
        return len(wanted & held) + max(best(at + 1, frozenset(some)) for some in kept(held | wanted, wanted))

    return max(best(0, frozenset(some)) for some in kept(universe, frozenset()))


@examples(40)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
    scope=st.sampled_from(["layer", "global"]),
    slots=st.integers(4, 8),
)
def test_the_bound_is_what_trying_everything_finds(sizes: list[int], seed: int, scope: str, slots: int) -> None:
    layers, experts, k = 2, 4, 2
    chunk = passes(sizes, seed, layers, experts, k)
    report = fed(Shadows(Setup(layers, experts, k, slots, scope), 100), chunk).report()
    if report is None:
        return
    requests: list[tuple[bool, list[frozenset[int]]]] = []
    at = 0
    for size, decode in zip(chunk.sizes.tolist(), chunk.decode.tolist(), strict=True):
        ids = chunk.ids[at : at + size]
        requests.append((decode, [frozenset((ids[:, i].astype(int) + i * experts).ravel()) for i in range(layers)]))
        at += size
    if scope == "layer":
        found = sum(
            most(
                [(d, by[i]) for d, by in requests],
                slots // layers + (i < slots % layers),
                frozenset(range(i * experts, (i + 1) * experts)),
            )
            for i in range(layers)
        )
    else:
        flat = [(d, one) for d, by in requests for one in (by if d else [frozenset().union(*by)])]
        found = most(flat, slots, frozenset(range(layers * experts)))
    assert round(report.belady * sizes.count(1) * layers * k) == found


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_shadows_are_the_simulators_caches(scope: str) -> None:
    """Fed in pieces, they hit what a replay of the whole hits; the window is the last of it, and so is the own rate."""
    chunk, slots = passes([3, *[1] * 50, 4, *[1] * 30], 5), 11
    shadows = Shadows(Setup(LAYERS, EXPERTS, K, slots, scope, POLICIES), 1000)
    at = 0
    for start in range(0, len(chunk.sizes), 7):
        of = slice(start, start + 7)
        n = int(chunk.sizes[of].sum())
        shadows.feed(
            Chunk(chunk.ids[at : at + n], chunk.sizes[of], chunk.decode[of], chunk.rid[of]),
            np.arange(start, start + len(chunk.sizes[of])),
            np.full(len(chunk.sizes[of]), 100),
        )
        at += n
    report = shadows.report()
    assert report is not None
    assert report.tokens == 80 and not report.bypass
    trace = ArrayTrace(np.zeros((0, LAYERS, K), np.uint8), EXPERTS)
    for name, rate in report.rates.items():
        replay = Replay(trace, maker(Config(name, slots)), [slots], scope, "filled")
        replay.feed(chunk)
        missed, asked = replay.tally.misses[1].sum(), replay.tally.requests[1].sum()
        assert rate == pytest.approx(1 - missed / asked), name
    decoded = np.flatnonzero(chunk.decode)
    assert report.own == pytest.approx(decoded.sum() / 100 / 80)
    shadows.window = 10
    last = fed(shadows, passes([1], 0)).report()
    assert last is not None
    assert last.tokens == 10
    shadows.forget()
    assert shadows.report() is None


def test_layers_may_have_slots_of_different_number() -> None:
    """All experts of the first layer fit, one token's of the second: the first never misses."""
    shadows = Shadows(Setup(2, 6, 2, 8, policies={"lru": {}}, shares=(6, 2)), 100)
    report = fed(shadows, passes([1] * 60, 3, 2, 6, 2)).report()
    even = fed(Shadows(Setup(2, 6, 2, 8, policies={"lru": {}}), 100), passes([1] * 60, 3, 2, 6, 2)).report()
    assert report is not None
    assert even is not None
    assert 0.5 <= report.rates["lru"] != even.rates["lru"]
    assert report.rates["lru"] <= report.belady


@pytest.mark.parametrize(
    "change", layered([{"eviction": "lfu"}, {"scope": "global"}], quick=lambda one: "scope" in one)
)
def test_the_chosen_policys_shadow_hits_what_the_engine_hits(demo: Engine, change: dict[str, object]) -> None:
    demo.change({**Settings({"budget": "50%", "link": "own"}), **change})
    restart(demo)
    shape = demo.shape
    shadows = Shadows(
        Setup(shape.layers, shape.experts, shape.top_k, demo.expert_cache.slots, str(demo.settings["scope"]), POLICIES),
        64,
    )
    for question in QUESTIONS:
        for piece in demo.generate([{"role": "user", "content": question}], Sampling(max_new_tokens=8)):
            if (step := piece.step) is not None:
                shadows.feed(
                    Chunk(
                        step.ids.transpose(1, 0, 2),
                        np.array([step.tokens], np.int32),
                        np.array([step.phase == "decode"]),
                        np.zeros(1, np.int32),
                    ),
                    [step.hits],
                    [step.requests],
                )
    report = shadows.report()
    assert report is not None
    assert 0.0 < report.own == report.rates[str(demo.settings["eviction"])] <= report.belady < 1.0
