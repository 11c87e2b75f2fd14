"""The replay of split experts in virtual time: by hand, and against the timed replay where no expert is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.allocation.cache_plan import LayerBlocks
from core.policy.allocation.expert_split import LayerTimes
from core.profile.trace import Chunk
from core.profile.trace.chunk import RANKED
from core.settings.registry import create
from core.simulate import Clock, Config
from core.simulate.run import maker
from core.simulate.split_replay import SplitReplay, SplitResult
from core.simulate.timed_replay import TimedReplay
from tests.selection import examples
from tests.simulate.test_curves import Recorded

TIMES = LayerTimes(att_ms=1.0, moe_ms=2.0, head_ms=1.0, load_ms=4.0)


def trace(ids: Any, experts: int, rows: Sequence[tuple[Any, ...]] = (), sizes: Sequence[int] = ()) -> Recorded:
    """[n, L, k] ids, each a decoded token unless `sizes` says otherwise."""
    made = np.array(ids, np.uint8)
    lengths = np.array(sizes or [1] * len(made), np.int32)
    zeros = np.zeros(len(lengths), np.int32)
    chunk = Chunk(made, lengths, lengths == 1, zeros, ranked=np.array([*rows], RANKED))
    return Recorded([chunk], made.shape[1], experts, made.shape[2])


def replay(of: Recorded, capacity: int, top: int, blocks: int, buffer: int, warm: int = 0) -> SplitResult:
    layers = [LayerBlocks(capacity, top)] * of.layers
    return SplitReplay(of, layers, blocks, buffer, TIMES, maker(Config("lru", 1))).run(warm)


def test_a_prediction_that_comes_late_by_hand() -> None:
    """Layer 0 is known at 2, its expert lands at 6 and is computed at 8; layer 1 is known at 9, its expert was
    predicted and copied from 6 to 10, and is computed at 12. The next token has both: 7 ms."""
    rows = [(0, 0, 1, 1, 1.0), (0, 1, 0, 0, 1.0), (1, 0, 1, 1, 1.0)]
    twice = trace([[[0], [1]]] * 2, 2, rows)
    found = replay(twice, capacity=2, top=1, blocks=2, buffer=1)
    assert found == SplitResult(2, 9.5, (0.5, 0.5), (2.0, 0.5), 1.0)
    after = replay(twice, capacity=2, top=1, blocks=2, buffer=1, warm=1)
    assert after == SplitResult(1, 7.0, (1.0, 1.0), (0.0, 0.0), 0.0)


def test_a_top_is_computed_while_its_bottom_is_on_the_way() -> None:
    """One block of two is kept. The second token is known at 10, its top is computed at 11, its bottom lands at 12."""
    found = replay(trace([[[0]], [[0]]], 2), capacity=1, top=1, blocks=2, buffer=1)
    assert found == SplitResult(2, 6.5, (0.25,), (2.5,), 0.75)


def test_a_prompt_takes_no_time_and_fills_the_cache() -> None:
    ids = [[[0]], [[1]], [[2]], [[2]]]
    found = replay(trace(ids, 4, sizes=[3, 1]), capacity=4, top=1, blocks=1, buffer=1)
    assert found == SplitResult(1, 4.0, (1.0,), (0.0,), 0.0)


@examples(25)
@given(
    seed=st.integers(0, 2**32),
    room=st.integers(2, 5),
    blocks=st.sampled_from([1, 4]),
    sizes=st.lists(st.sampled_from([1, 1, 1, 3]), min_size=2, max_size=25),
)
def test_whole_experts_take_what_the_timed_replay_says(seed: int, room: int, blocks: int, sizes: list[int]) -> None:
    layers, experts, k = 3, 6, 2
    rng = np.random.default_rng(seed)
    ids = rng.gumbel(size=(sum(sizes), layers, experts)).argsort(-1)[..., :k]
    of = trace(ids, experts, sizes=sizes)
    clock = Clock(compute_ms=1.0 + 3 * 3.0, load_ms=4.0, expert_ms=1.0, head_ms=1.0)
    config = Config("lcp", layers * room + k, sizes=(room,) * layers, transit=k)
    sums = TimedReplay(of, config, create("predictor", "none", {}), clock, 1).run()["decode"]
    whole = [LayerBlocks(room * blocks, blocks)] * layers
    found = SplitReplay(of, whole, blocks, k, TIMES, maker(Config("lcp", 1))).run()
    if sums.tokens:
        assert found.tokens == sums.tokens
        assert found.tpot_ms == pytest.approx((sums.compute_s + sums.stall_s) * 1e3 / sums.tokens)
        assert sum(found.exposed_ms) == pytest.approx(sums.stall_s * 1e3 / sums.tokens)


@examples(25)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(0, 24),
    top=st.integers(0, 4),
    buffer=st.integers(2, 4),
    warm=st.integers(0, 5),
)
def test_parts_add_up_with_predictions(seed: int, capacity: int, top: int, buffer: int, warm: int) -> None:
    """Computing and waiting make up the time, and what is ready is a part of what is asked for."""
    layers, experts, k, tokens = 2, 6, 2, 20
    rng = np.random.default_rng(seed)
    ids = rng.gumbel(size=(tokens, layers, experts)).argsort(-1)[..., :k]
    rows = [
        (token, at, (at + 1) % layers, int(expert), 1 - rank / experts)
        for token in range(tokens)
        for at in range(layers)
        for rank, expert in enumerate(rng.permutation(experts))
    ]
    found = replay(trace(ids, experts, rows), capacity, top, 4, buffer, warm)
    assert found.tokens == tokens - warm
    assert found.tpot_ms == pytest.approx(1.0 + layers * 3.0 + sum(found.exposed_ms))
    assert all(0 <= one <= k + 1e-9 for one in found.ready) and all(one >= -1e-9 for one in found.exposed_ms)
    assert found.copied >= sum(k - one for one in found.ready) - 1e-9 or warm
