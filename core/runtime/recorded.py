"""The record of a pass, as it is noted within the pass: plain numbers, of which the rest is made when it is read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import numpy as np

from core.cache.counts import FIGURES, Counts
from core.cache.lease import LeasedSegment, SkippedRequest
from core.metrics.record import Outcome, Phase, StepRecord, Transfer
from core.types import ModelShape

LATER = frozenset((*FIGURES, "ids", "layer", "expert", "outcome", "transfers"))
DEFAULTS = {one.name: one.default for one in fields(StepRecord) if one.default is not MISSING and one.name not in LATER}
Ran = tuple[int, list[list[int]], Sequence[LeasedSegment | SkippedRequest] | None]
"""A layer that ran: which, the router's choice [T][k], and the outcome of each distinct expert's request; None = those
of one token, all of them hits."""
Copy = tuple[int, int, bool, float, float, float, bool]
"""(eid, bytes, demand, submitted, started, ended: seconds on the session's clock, whether it was read from disk)"""


class Noted(NamedTuple):
    """What a pass noted of its routing, requests and copies. Numbers alone, so that no slot stays alive for it, and
    flat, so that there is little to collect."""

    shape: ModelShape
    counts: Counts  # without tickets
    copies: Sequence[Copy]
    layers: list[int]  # that ran
    chosen: array[int]  # by the router: of each of these layers, row by row
    requests: tuple[list[int], array[int], bytearray] | None
    """How many each of these layers made, then the expert and the outcome of each; None = those of one token, all of
    them hits."""


def note(shape: ModelShape, counts: Counts, copies: Sequence[Copy], ran: Sequence[Ran]) -> Noted:
    """What these layers are noted as."""
    chosen = array("h")
    for _, ids, _ in ran:
        for row in ids:
            chosen.fromlist(row)
    requests = None
    if [some for _, _, some in ran if some is not None]:
        made, experts, outcomes = list[int](), array("h"), bytearray()
        for _, ids, some in ran:
            named = ids[0] if some is None else [one.expert for one in some]
            made.append(len(named))
            experts.fromlist(named)
            outcomes += bytes([Outcome.HIT] * len(named) if some is None else [one.outcome for one in some])
        requests = made, experts, outcomes
    return Noted(shape, counts, copies, [layer for layer, _, _ in ran], chosen, requests)


class Recorded(StepRecord):
    """A StepRecord whose fields named in LATER are made when one of them is first read, on the reading thread, to keep
    that work out of the pass. Two threads that read at once make equal values. The others are set by whoever makes the
    record, or have their default."""

    __slots__ = ("_noted",)

    def __init__(self, noted: Noted, phase: Phase, tokens: int) -> None:
        self._noted: Noted | None = noted
        self.phase, self.tokens, self.idle_ms, self.lossy = phase, tokens, 0.0, None

    def __getattr__(self, name: str) -> Any:
        """Called only for attributes that are not set, or not yet."""
        noted: Noted | None = object.__getattribute__(self, "_noted")
        if noted is not None and name in LATER:
            self._make(noted)
            self._noted = None  # last: a thread that finds nothing noted finds the fields
        elif name in DEFAULTS:
            setattr(self, name, DEFAULTS[name])
        return object.__getattribute__(self, name)

    def _make(self, noted: Noted) -> None:
        for name, count in zip(FIGURES, noted.counts.values(), strict=True):
            setattr(self, name, count)
        shape, layers, chosen = noted.shape, np.array(noted.layers, np.int16), np.frombuffer(noted.chosen, np.int16)
        whole = len(layers) == shape.layers
        self.ids = (chosen if whole else chosen[:0]).reshape(-1, self.tokens, shape.top_k)
        if noted.requests is None:
            self.layer, self.expert = np.repeat(layers, shape.top_k), chosen
            self.outcome = np.zeros(len(chosen), np.uint8)  # Outcome.HIT of each
        else:
            made, experts, outcomes = noted.requests
            self.layer, self.expert = np.repeat(layers, made), np.frombuffer(experts, np.int16)
            self.outcome = np.frombuffer(outcomes, np.uint8)
        self.transfers = tuple([self._transfer(shape, *copy) for copy in noted.copies])

    def _transfer(
        self,
        shape: ModelShape,
        eid: int,
        size: int,
        demand: bool,
        submitted_s: float,
        started_s: float,
        ended_s: float,
        from_disk: bool,
    ) -> Transfer:
        layer, expert = divmod(eid, shape.experts)
        times = submitted_s, started_s, ended_s
        return Transfer(layer, expert, size, demand, *times, self.phase, "disk" if from_disk else "host")
