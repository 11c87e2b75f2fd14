"""Decides the order of prefetches, by the predictor's priority of each, and which of them would come too late."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.memory.ticket import Link, Ticket
from core.policy.predict import LayerMap, Prediction
from core.policy.predict.base import PriorityFormula, by_score
from core.settings.prefetch import PrefetchSettings

WINDOW = 33  # layer times kept; odd, so that the median is one of them


class Rhythm:
    """Layer times, waits included: moving medians of the time between the moments at which predictions are made.

    Prompts and single tokens are kept apart, and so is the step from the last layer to the first one of the next token.
    For a prompt only the present pass counts, since prompts differ in length.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._spans: dict[tuple[str, bool], deque[float]] = {}  # (phase, wraps to the next token) -> seconds
        self._last: tuple[str, int, float] | None = None
        self._phase = ""

    def note(self, phase: str, layer: int, now_s: float) -> None:
        """Record that `layer` is reached now. Only the first call in a layer counts. Layers in between that made no
        predictions took as long each."""
        if self._layers > 1 and self._last is not None and self._last[:2] == (phase, layer):
            return
        if phase == "prefill" and layer == 0:
            self._spans.pop((phase, False), None)
        if self._last is not None and self._last[0] == phase:
            ahead, wraps = layer - self._last[1], layer == 0 and self._last[1] + 1 == self._layers
            if ahead > 0 or wraps:
                spans = self._spans.setdefault((phase, wraps), deque(maxlen=WINDOW))
                spans.append((now_s - self._last[2]) / max(ahead, 1))
        self._last, self._phase = (phase, layer, now_s), phase

    def until(self, at: int, distance: int) -> float:
        """Seconds from layer `at` (-1: before the first) to `distance` layers ahead; infinite before any time is
        known."""
        spans = self._spans.get((self._phase, False))
        if not spans:
            return math.inf
        layer_s, wraps = median(spans), at >= 0 and at + distance >= self._layers
        over = self._spans.get((self._phase, True)) if wraps else None
        return (distance - 1) * layer_s + (median(over) if over else layer_s)


class Planned(NamedTuple):
    """A prefetch to issue: its predicted probability of use, and its priority."""

    eid: int
    score: float
    priority: float


@dataclass(slots=True)
class QueueChanges:
    """Changes to the queue: prefetches to `issue`, best first; new `priorities` of queued prefetches; queued prefetches
    to `drop`, since they would come too late."""

    issue: list[Planned] = field(default_factory=list)
    priorities: list[tuple[Ticket, float]] = field(default_factory=list)
    drop: list[Ticket] = field(default_factory=list)


class Schedule:
    """Orders predictions. With `deadline`, an expert that cannot arrive before its layer is reached is not fetched."""

    def __init__(self, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self.deadline = False
        self.rhythm = Rhythm(layers)
        self._formula: PriorityFormula = by_score
        self._maps: dict[int, npt.NDArray[np.float32]] = {}  # layer -> the newest [E]

    def configure(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Use the deadline, or do not."""
        self.deadline = new.deadline

    def use(self, formula: PriorityFormula, maps: Iterable[LayerMap]) -> None:
        """Order by `formula`, and by these `maps` of layers where it reads any."""
        if formula is not self._formula:
            self._formula, self._maps = formula, {}
        for layer, distribution in maps:
            self._maps[layer] = distribution

    def priority(self, eid: int, score: float, at: int) -> float:
        """Of a prefetch that is requested with probability `score`, seen from layer `at`."""
        layer, p = eid // self.experts, score
        if self._maps and (row := self._maps.get(layer)) is not None:
            p = float(row[eid % self.experts])
        return self._formula(score, p, (layer - at - 1) % self.layers + 1)  # `distance`: this is called often

    def distance(self, at: int, layer: int) -> int:
        """Layers from `at` (-1 = before the first) to `layer`: 1 for the next; `at` itself is a whole token away."""
        return (layer - at - 1) % self.layers + 1

    def sort(self, predictions: Iterable[Prediction], at: int) -> list[Prediction]:
        """By descending priority; ties keep their order."""
        experts, priority = self.experts, self.priority
        return sorted(predictions, key=lambda one: -priority(one.layer * experts + one.expert, one.score, at))

    def rank(
        self,
        predictions: Sequence[Prediction],
        at: int,
        queued: Iterable[Ticket],
        absent: Callable[[int], bool],
        link: Link,
        size_bytes: int,
    ) -> QueueChanges:
        """Rank `predictions` made in layer `at` together with the `queued` prefetches. `absent(eid)`: the expert has no
        slot.

        By the times measured so far, a copy is in time when the copies before it in this order, and those the link is
        busy with, leave room for it before its layer is reached; with no measurements yet, all are. A queued prefetch
        that is predicted again takes the newer score.
        """
        scores = {prediction.layer * self.experts + prediction.expert: prediction.score for prediction in predictions}
        entries: list[tuple[float, int, Ticket | None]] = []
        for ticket in queued:
            ticket.score = scores.get(ticket.eid, ticket.score)
            entries.append((self.priority(ticket.eid, ticket.score, at), ticket.eid, ticket))
        entries += [(self.priority(eid, score, at), eid, None) for eid, score in scores.items() if absent(eid)]
        entries.sort(key=lambda entry: -entry[0])
        return self._in_time(entries, scores, at, link, size_bytes)

    def plan_buffer(
        self,
        predictions: Sequence[Prediction],
        at: int,
        queued: Iterable[Ticket],
        lacking: Callable[[int], float],
        link: Link,
        size_bytes: int,
    ) -> QueueChanges:
        """The prefetches into a buffer by `predictions` made in layer `at`: those whose copies can start before their
        layer is reached, by the times measured so far, up to the first that cannot. `lacking(eid)`: the share of its
        `size_bytes` that has to be copied. `queued` prefetches that are predicted again take the newer score."""
        changes, again = QueueChanges(), {ticket.eid: ticket for ticket in queued}
        for layer, expert, score in predictions if again else ():
            if (ticket := again.get(layer * self.experts + expert)) is not None:
                ticket.score = score
                changes.priorities.append((ticket, self.priority(ticket.eid, score, at)))
        one_s = link.copy_s(size_bytes)
        busy_s = link.backlog_s() if one_s else 0.0
        until_s = dict[int, float]()  # by distance
        for layer, expert, score in self.sort(predictions, at):
            eid, distance = layer * self.experts + expert, self.distance(at, layer)
            if not (share := lacking(eid)):
                continue
            if distance not in until_s:
                until_s[distance] = self.rhythm.until(at, distance)
            if busy_s > until_s[distance]:
                break
            busy_s += one_s * share / link.lanes
            changes.issue.append(Planned(eid, score, self.priority(eid, score, at)))
        return changes

    def _in_time(
        self,
        entries: Iterable[tuple[float, int, Ticket | None]],
        scores: dict[int, float],
        at: int,
        link: Link,
        size_bytes: int,
    ) -> QueueChanges:
        ranked, one_s = QueueChanges(), link.copy_s(size_bytes) if self.deadline else 0.0
        begin_s = link.backlog_s() if one_s else 0.0
        for priority, eid, ticket in entries:
            if one_s and begin_s + one_s > self.rhythm.until(at, self.distance(at, eid // self.experts)):
                if ticket is not None:
                    ranked.drop.append(ticket)
                continue
            begin_s += one_s / link.lanes
            if ticket is not None:
                ranked.priorities.append((ticket, priority))
            else:
                ranked.issue.append(Planned(eid, scores[eid], priority))
        return ranked
