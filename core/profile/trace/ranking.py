"""The predictions recorded with a trace, as rankings: for every pass and layer the experts that were predicted for it,
the likeliest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from core.profile.trace.chunk import Chunk, Trace

Ranking = npt.NDArray[np.int16]
NONE = -1  # no expert: fewer were predicted


def rankings(trace: Trace) -> Iterator[tuple[Chunk, Ranking | None]]:
    """Yields every chunk with its passes' rankings [p, L, E], NONE after the last; None = it records no predictions.

    The newest prediction for a layer before its routing was known counts. One made for a layer that was already reached
    is for the next pass. Memory: 2 L E bytes a pass of the chunk.
    """
    left: Ranking = np.full((trace.layers, trace.experts), NONE, np.int16)  # for the first pass of the next chunk
    for chunk in trace.chunks():
        if chunk.ranked is None:
            left[:] = NONE
            yield chunk, None
            continue
        found = _ranked(chunk.ranked, len(chunk.sizes) + 1, trace.layers, trace.experts)
        found[0] = np.where(found[0, :, :1] == NONE, left, found[0])
        left = found[-1].copy()
        yield chunk, found[:-1]


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
