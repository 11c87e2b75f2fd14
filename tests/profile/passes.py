"""Passes with drawn routing and predictions, and the ids that a trace gives back."""

from pathlib import Path
from typing import Any

import numpy as np

from core.metrics.record import ShadowPredictions
from core.profile.trace import FileTrace, Trace, TraceHead, TraceWriter
from core.profile.trace.chunk import BESIDE, RANKED, beside_map_type
from core.types import Phase, StepRecord


def step(ids: Any, phase: Phase = "decode", request: int = 0) -> StepRecord:
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


GATE: Any = ("gate", {"width": 0, "floor": 0.0, "distance": 0})
MAPS: Any = ("expert_map", {"distance": 0, "capacity": 1000, "semantic": True, "dynamic": True, "learn": True})


def written(path: Path, *, by: int = 0, expert: int = 4) -> FileTrace:
    """Three passes; in pass n the gate names expert n in layer 1 from layer 0, and the maps expert 8 at the start."""
    with TraceWriter(path, TraceHead(3, 9, 2, beside=[GATE, MAPS])) as writer:
        for number, ids in enumerate(routed(3)):
            one = step(ids[:, None])
            rows = [(by, 0, 0, 1, min(number, expert), 0.5), (1, 0, -1, 0, 8, 0.25)]
            found = [(1, 0, 1, 2, np.full(9, number / 9, np.float32))]
            one.beside = ShadowPredictions((GATE, MAPS), np.array(rows, BESIDE), np.array(found, beside_map_type(9)))
            writer.add(one)
        strange = step(routed(1)[0][:, None])
        alone = np.array([(0, 0, 0, 1, 5, 0.5)], BESIDE)
        strange.beside = ShadowPredictions((GATE,), alone, np.empty(0, beside_map_type(9)))
        writer.add(strange)  # of other predictors than the file's
    return FileTrace(path)
