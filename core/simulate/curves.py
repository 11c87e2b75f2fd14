"""Measures the statistics that a cache is planned from on a recorded trace: the exact replay of the cache at many sizes
at once, beside what its recorded predictions were worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.errors import TraceError
from core.policy.allocation.curves import Curves, Floats
from core.policy.eviction import GONE, MakePolicy
from core.simulate.replay import Replay
from core.trace import Chunk, Trace
from core.trace.ranking import NONE, rankings

SIZES = 32  # cache sizes replayed at most; between them, values are interpolated
Counts = npt.NDArray[np.int64]


def measure_curves(trace: Trace, make: MakePolicy, *, sizes: Sequence[int] = (), last: int = 0) -> Curves:
    """Curves of the trace's decoded tokens, each a pass of its own, for an eviction policy whose caches start full.

    `sizes`: those replayed, between k and E (default: all, or SIZES of them evenly spaced). Other sizes are linear
    between these; below the smallest the curves fall to 0 at no expert, as a cache that cannot hold a token's experts
    does not run. `last`: only that many tokens at the end of the trace; 0 = all of it.

    Predictions are those recorded with the trace (`chat --predictor gate --set predictor.gate.width=256
    --record-ranks`: a ranking of all experts needs a width of so many); without them Y is 0. A token without one counts
    as having predicted nothing. Raises TraceError when there is no such token.
    """
    layers, experts, k = trace.layers, trace.experts, trace.top_k
    played = np.array(sorted({*(sizes or _spaced(k, experts))}))
    replay = Replay(trace, make, [int(size) * layers for size in played], start="filled")
    shape = len(played), layers
    requests, hits = np.zeros(layers, np.int64), np.zeros(shape, np.int64)
    chosen, cached = np.zeros((layers, experts), np.int64), np.zeros((*shape, experts), np.int64)
    first, at, tokens = trace.tokens - (last or trace.tokens), 0, 0
    base = np.arange(layers)[:, None] * experts
    for chunk, ranked in rankings(trace):
        begin = 0
        for number, size in enumerate(chunk.sizes.tolist()):
            ids, begin, at = chunk.ids[begin : begin + size], begin + size, at + size
            if at <= first:
                continue
            counts = bool(chunk.decode[number]) and size == 1
            if counts and ranked is not None:
                eids = ranked[number] + base  # [L, E] of the ranking
                there = ranked[number] != NONE
                asked = np.zeros(layers * experts, np.bool_)
                asked[ids[0] + base] = True
                chosen += asked[eids] & there
                held = (replay.cache.policy.score != GONE).reshape(len(played), -1)
                cached += held[:, eids] & there
            asked_for, missed = replay.feed(_one(chunk, number, ids))
            if counts:
                tokens += 1
                requests += asked_for[0, :layers]
                hits += (asked_for - missed).reshape(shape)
    if not tokens:
        raise TraceError("This trace has no decoded token to plan from. Record an answer, not only a prompt.")
    ranks = int(np.flatnonzero(chosen.any(0)).max(initial=-1)) + 1  # what no layer ever needed adds nothing
    between = _between(played, experts)
    return Curves(
        k,
        tokens,
        (between @ (hits / requests)).T,
        chosen[:, :ranks] / tokens,
        np.einsum("cs,sly->lcy", between, cached[..., :ranks] / tokens),
    )


def _spaced(k: int, experts: int) -> list[int]:
    """Cache sizes from k to E."""
    return [int(size) for size in np.linspace(k, experts, min(SIZES, experts - k + 1)).round()]


def _between(played: npt.NDArray[np.int64], experts: int) -> Floats:
    """[E + 1, sizes] weights of the sizes replayed in the value at each size."""
    known = np.concatenate(([0], played))
    rows = [np.interp(np.arange(experts + 1), known, row) for row in np.eye(len(known))[1:]]
    return np.stack(rows, 1)


def _one(chunk: Chunk, number: int, ids: npt.NDArray[np.integer]) -> Chunk:
    """A pass of a chunk, as a chunk of its own."""
    part = slice(number, number + 1)
    return Chunk(ids, chunk.sizes[part], chunk.decode[part], chunk.rid[part])
