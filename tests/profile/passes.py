"""Passes with drawn routing and predictions, and the ids that a trace gives back."""

from typing import Any

import numpy as np

from core.profile.trace import Trace
from core.profile.trace.chunk import RANKED
from core.types import Phase, StepRecord


def step(ids: Any, phase: Phase = "decode", request: int = 0) -> StepRecord:
    """A record with the routing [layers, tokens, k] and whose it is, and nothing else."""
    array = np.array(ids, np.int16)
    none = np.zeros(0, np.int16)
    tokens = array.shape[1]
    figures = (tokens, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    return StepRecord(0, phase, *figures, array, none, none, none.astype(np.uint8), rows=((request, tokens),))


def routed(tokens: int, experts: int = 9, layers: int = 3, k: int = 2, seed: int = 0) -> Any:
    noise = np.random.default_rng(seed).random((tokens, layers, experts))
    return np.argsort(noise, 2)[..., :k]


def read(trace: Trace) -> Any:
    return np.concatenate([chunk.ids for chunk in trace.chunks()])


def drawn_predictions(passes: int, count: int, seed: int = 0) -> Any:
    """`count` guesses in each of so many passes."""
    rng, rows = np.random.default_rng(seed), []
    for of in range(passes):
        rows += [(of, rng.integers(-1, 3), rng.integers(3), rng.integers(9), rng.random()) for _ in range(count)]
    return np.array(rows, RANKED)
