"""Recall by hand: what was named last for a layer, its best m, beside what the layer then asks for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TraceError
from core.profile.trace import ArrayTrace, Chunk, FileTrace, TraceHead, TraceWriter
from core.profile.trace.chunk import RANKED
from core.simulate import Clock, Config
from core.simulate.prefetchers import TimedConfig, timed
from core.simulate.recall import recall
from tests.selection import layered
from tests.simulate.test_engine import routes

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
