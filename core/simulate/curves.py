"""Measures the statistics that a cache is planned from: the exact replay of the cache at many sizes at once, and beside
it what predictions made for the same tokens were worth."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import TraceError
from core.policy.allocation.curves import Curves, Floats
from core.policy.eviction import GONE, MakePolicy, policy_maker
from core.profile.trace import ArrayTrace, Chunk, Trace
from core.profile.trace.ranking import NONE, rankings
from core.settings.config import Settings
from core.simulate.replay import Replay

SIZES = 32  # cache sizes replayed at most; between them, values are interpolated
Ids = npt.NDArray[np.integer[Any]]


class CurveMeter:
    """Collects the curves of an eviction policy whose caches start full, token by token.

    `sizes`: those replayed, between k and E (default: all, or SIZES of them evenly spaced). Other sizes are linear
    between these; below the smallest the curves fall to 0 at no expert, as a cache that cannot hold a token's experts
    does not run. Memory: 8 L E (sizes + 1) bytes a few times."""

    def __init__(self, layers: int, experts: int, top_k: int, make: MakePolicy, sizes: Sequence[int] = ()) -> None:
        self.tokens = 0
        self._k, self._experts = top_k, experts
        self._played = np.array(sorted({*(sizes or _spaced(top_k, experts))}))
        nothing = ArrayTrace(np.zeros((0, layers, top_k), np.int16), experts)
        self._replay = Replay(nothing, make, [int(size) * layers for size in self._played], start="filled")
        shape = len(self._played), layers
        self._requests, self._hits = np.zeros(layers, np.int64), np.zeros(shape, np.int64)
        self._chosen = np.zeros((layers, experts), np.int64)
        self._cached = np.zeros((*shape, experts), np.int64)
        self._base = np.arange(layers)[:, None] * experts

    def add(self, ids: Ids, ranked: Ids | None = None) -> None:
        """The next token: its experts [L, k], and [L, Y] those predicted for it before each layer's routing was known,
        the likeliest first, NONE after the last; None = nothing was predicted."""
        if ranked is not None:
            there, of = ranked != NONE, ranked + self._base
            asked = np.zeros(self._chosen.size, np.bool_)
            asked[ids + self._base] = True
            width = ranked.shape[1]
            self._chosen[:, :width] += asked[of] & there
            held = (self._replay.cache.policy.score != GONE).reshape(len(self._played), -1)
            self._cached[..., :width] += held[:, of] & there
        requests, missed = self._feed(ids[None], decode=True)
        self.tokens += 1
        self._requests += requests[0, : len(self._requests)]
        self._hits += (requests - missed).reshape(self._hits.shape)

    def warm(self, ids: Ids) -> None:
        """A pass over several tokens [n, L, k], which the caches see and the curves do not count."""
        self._feed(ids, decode=False)

    def curves(self) -> Curves:
        """The curves of all tokens so far, of which there must be one."""
        ranks = _ranks(self._chosen)
        between = _between(self._played, self._experts)
        return Curves(
            self._k,
            self.tokens,
            (between @ (self._hits / self._requests)).T,
            self._chosen[:, :ranks] / self.tokens,
            np.einsum("cs,sly->lcy", between, self._cached[..., :ranks] / self.tokens),
        )

    def _feed(self, ids: Ids, *, decode: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        sizes = np.array([len(ids)], np.int32)
        return self._replay.feed(Chunk(ids, sizes, np.array([decode]), np.zeros(1, np.int32)))


def measure_curves(trace: Trace, make: MakePolicy, *, sizes: Sequence[int] = (), last: int = 0) -> Curves:
    """Curves of a trace's decoded tokens, each a pass of its own; `make` and `sizes` as for CurveMeter. `last`: only
    that many tokens at the end of the trace; 0 = all of it.

    Predictions are those recorded with the trace (`chat --predictor gate --set predictor.width=256 --record FILE
    --record-ranks`: a ranking has as many experts as the predictor's width); without them Y is 0. A token without any
    counts as having predicted nothing. Raises TraceError when no token was decoded."""
    meter = CurveMeter(trace.layers, trace.experts, trace.top_k, make, sizes)
    first, at = trace.tokens - (last or trace.tokens), 0
    for chunk, ranked in rankings(trace):
        begin = 0
        for number, size in enumerate(chunk.sizes.tolist()):
            ids, begin, at = chunk.ids[begin : begin + size], begin + size, at + size
            if at > first and chunk.decode[number] and size == 1:
                meter.add(ids[0], None if ranked is None else ranked[number])
            elif at > first:
                meter.warm(ids)
    if not meter.tokens:
        raise TraceError("This trace has no decoded token to plan from. Record an answer, not only a prompt.")
    return meter.curves()


def routed_curves(
    ids: Ids, experts: int, ranked: Ids | None = None, wanted: Callable[[], bool] = lambda: True
) -> Curves | None:
    """The curves of decoded tokens' experts [T, L, k] with LCP as it is by default, by a new CurveMeter. `ranked` [R,
    L, Y]: the rankings of the last R of them, as for CurveMeter; P and PH are of these tokens alone. None = no
    predictions, Y is 0.

    Asked before every token whether this is still `wanted`; None when it is not. Raises TraceError when there is no
    token."""
    tokens, layers, k = ids.shape
    if not tokens:
        raise TraceError("There is no decoded token to plan from.")
    ranked = np.zeros((0, layers, 0), np.int16) if ranked is None else ranked[-tokens:]
    meter = CurveMeter(layers, experts, k, policy_maker(Settings().choice("eviction", "lcp")))
    for at, each in enumerate(ids, start=len(ranked) - tokens):
        if not wanted():
            return None
        meter.add(each, ranked[at] if at >= 0 else None)
    curves, part = meter.curves(), len(ranked) / tokens  # of the tokens has rankings
    return replace(curves, chosen=curves.chosen / part, cached=curves.cached / part) if part else curves


def _ranks(chosen: npt.NDArray[np.int64]) -> int:
    """Ranks [.., Y] up to the last that was ever right: what is never needed adds nothing."""
    return int(np.flatnonzero(chosen.any(0)).max(initial=-1)) + 1


def _spaced(k: int, experts: int) -> list[int]:
    """Cache sizes from k to E."""
    return [int(size) for size in np.linspace(k, experts, min(SIZES, experts - k + 1)).round()]


def _between(played: npt.NDArray[np.int64], experts: int) -> Floats:
    """[E + 1, sizes] weights of the sizes replayed in the value at each size."""
    known = np.concatenate(([0], played))
    rows = [np.interp(np.arange(experts + 1), known, row) for row in np.eye(len(known))[1:]]
    return np.stack(rows, 1)
