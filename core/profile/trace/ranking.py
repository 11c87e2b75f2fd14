"""The predictions recorded with a trace, as rankings: for every pass and layer the experts that were predicted for it,
the likeliest first."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from core.profile.trace.chunk import Chunk, Trace

Ranking = npt.NDArray[np.int16]
NONE = -1  # no expert: fewer were predicted


def rankings(trace: Trace) -> Iterator[tuple[Chunk, Ranking | None]]:
    """Yields every chunk with its passes' rankings, as `PassRankings.take` has them; None = it records no
    predictions."""
    passes = PassRankings(trace.layers, trace.experts)
    for chunk in trace.chunks():
        if chunk.ranked is None:
            passes.forget()
            yield chunk, None
        else:
            yield chunk, passes.take(chunk.ranked, len(chunk.sizes))


class PassRankings:
    """The rankings of consecutive passes of a model with these layers and experts.

    The newest prediction for a layer before its routing was known counts. One made for a layer that was already reached
    is for the next pass, unless that is forgotten."""

    def __init__(self, layers: int, experts: int) -> None:
        self._left: Ranking = np.full((layers, experts), NONE, np.int16)  # for the first of the next passes

    def take(self, rows: npt.NDArray[Any], passes: int = 1) -> Ranking:
        """RANKED rows of the next `passes` -> [passes, L, E], NONE after the last. Memory: 2 L E bytes a pass."""
        found = _ranked(rows, passes + 1, *self._left.shape)
        found[0] = np.where(found[0, :, :1] == NONE, self._left, found[0])
        self._left = found[-1].copy()
        return found[:-1]

    def forget(self) -> None:
        """What was predicted is not of the next pass."""
        self._left[:] = NONE


def _ranked(rows: npt.NDArray[Any], passes: int, layers: int, experts: int) -> Ranking:
    """RANKED rows -> [passes, L, E], the last of them for what comes after the chunk."""
    found: Ranking = np.full((passes * layers, experts), NONE, np.int16)
    of, at, layer = (rows[name].astype(np.int64) for name in ("of", "at", "layer"))
    place = (of + (layer <= at)) * layers + layer  # pass and layer that it is for
    made = of * (layers + 1) + at + 1  # when; predictions of one moment belong together
    newest = np.full(passes * layers, -1)
    np.maximum.at(newest, place, made)
    kept = np.flatnonzero(made == newest[place])
    kept = kept[np.lexsort((-rows["score"][kept].astype(np.float64), place[kept]))]  # stable: ties as they were made
    place = place[kept]
    rank = np.arange(len(place)) - np.searchsorted(place, place)
    fits = rank < experts
    found[place[fits], rank[fits]] = rows["expert"][kept[fits]]
    return found.reshape(passes, layers, experts)
