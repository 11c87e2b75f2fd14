"""The record of a pass as it is noted within the pass: plain numbers, of which the rest is made when it is first read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from core.cache.lease import FIGURES
from core.metrics.record import Phase, StepRecord, Transfer

Copy = tuple[int, int, bool, float, float, float, bool]
"""(eid, bytes, demand, submitted, started, ended: seconds on the session's clock, whether it was read from disk)"""


class Noted(NamedTuple):
    """What a pass noted and its record does not contain as it is. Numbers only, so that no slot and no copy stays alive
    for it, and flat, so that there is little to collect."""

    figures: tuple[int, ...]  # of Counts, by FIGURES
    ids: array[int]  # of all layers, row by row; empty unless all of them ran
    layers: array[int]  # for each layer that ran: which, and how many requests it made
    experts: array[int]  # of the requests, one layer after the other
    outcomes: bytes  # of each
    copies: Sequence[Copy]
    experts_per_layer: int
    top_k: int


LATER = frozenset((*FIGURES, "ids", "layer", "expert", "outcome", "transfers"))


class Recorded(StepRecord):
    """A StepRecord whose fields named in LATER are made when one of them is first read, on the reading thread, to keep
    that work out of the pass. Two threads that read at once make equal values. Who makes a record sets the other fields
    that have no default."""

    __slots__ = ("_noted",)

    def __init__(self, noted: Noted, phase: Phase, tokens: int) -> None:
        self._noted: Noted | None = noted
        self.phase, self.tokens = phase, tokens
        self.cached_tokens, self.idle_ms, self.record_ms, self.exact = 0, 0.0, 0.0, True
        self.probs = self.ranked = self.maps = self.tok = self.beside = self.lossy = None

    def __getattr__(self, name: str) -> Any:
        """Called only for attributes that are not set, or not yet."""
        noted: Noted | None = object.__getattribute__(self, "_noted")
        if noted is not None and name in LATER:
            self._make(noted)
            self._noted = None  # last: a thread that finds nothing noted finds the fields
        return object.__getattribute__(self, name)

    def _make(self, noted: Noted) -> None:
        for name, figure in zip(FIGURES, noted.figures, strict=True):
            setattr(self, name, figure)
        self.ids = np.frombuffer(noted.ids, np.int16).reshape(-1, self.tokens, noted.top_k)
        self.layer = np.repeat(*np.frombuffer(noted.layers, np.int16).reshape(-1, 2).T)
        self.expert = np.frombuffer(noted.experts, np.int16)
        self.outcome = np.frombuffer(noted.outcomes, np.uint8)
        self.transfers = tuple(
            [
                Transfer(
                    *divmod(eid, noted.experts_per_layer),
                    size,
                    demand,
                    submitted_s,
                    started_s,
                    ended_s,
                    self.phase,
                    "disk" if disk else "host",
                )
                for eid, size, demand, submitted_s, started_s, ended_s, disk in noted.copies
            ]
        )
