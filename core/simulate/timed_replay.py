"""One configuration over one trace with prefetching: the engine's own cache, layer by layer, on a virtual clock.

Steps in a layer, in the order of `core.runtime.moe_step`: routing, cache requests, prediction, computing the resident
experts, then each missing expert when its copy lands, release of the slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.cache.copies import CacheMemory
from core.cache.counts import Counts, PrefetchCost
from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease
from core.metrics import BY_NAME, METRICS
from core.policy.predict import Prediction, Predictor
from core.policy.predict.base import PredictorProfile
from core.profile.trace import Chunk, Trace
from core.settings.prefetch import PrefetchSettings
from core.simulate.blocks import BLOCKS, Block, block_of
from core.simulate.clock import Clock
from core.simulate.replayed import Replayed
from core.simulate.run import Config, maker
from core.simulate.trace_view import TraceView
from core.simulate.virtual_clock import VirtualExperts, VirtualLink, VirtualSlots
from core.types import Outcome, Phase

Ints = npt.NDArray[Any]
PREFETCH = PrefetchSettings()


@dataclass(slots=True)
class Sums:
    """Counts over the passes of one phase."""

    passes: int = 0
    tokens: int = 0
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    compute_s: float = 0.0
    stall_s: float = 0.0
    net_ms: float = 0.0
    counts: Counts = field(default_factory=Counts)

    def figures(self) -> dict[str, float]:
        """Every metric of core.metrics that a replay counts: requests by outcome, times, and what the cache counts."""
        busy_s = self.compute_s + self.stall_s
        counted = {
            "tokens": self.tokens,
            "total_ms": busy_s * 1e3,
            "compute_ms": self.compute_s * 1e3,
            "stall_ms": self.stall_s * 1e3,
            "net_ms": self.net_ms,
            **self.counts.figures(),
            **{one.name: sum(self.outcomes[each] for each in one.outcomes) for one in METRICS if one.outcomes},
        }
        return {one.name: counted[one.name] for one in METRICS if one.name in counted}


class DecodedToken(NamedTuple):
    """What a decoded token cost, and what was there for it."""

    at: int  # its number in the trace
    ms: float
    requests: int
    hits: int
    recalled: int  # requests among the first k of the layer's last prediction


class TimedReplay:
    """`clock` gives the durations. Of `prefetch`, the predictor and prefetch_auto have no effect."""

    def __init__(
        self,
        trace: Trace,
        config: Config,
        predictor: Predictor,
        clock: Clock,
        blob_bytes: int,
        *,
        start: str = "empty",
        prefetch: PrefetchSettings = PREFETCH,
        profile: PredictorProfile | None = None,
    ) -> None:
        self.trace, self.clock, self.predictor, self.profile = trace, clock, predictor, profile
        self.link = VirtualLink(0.0)
        memory = CacheMemory(VirtualSlots(), VirtualExperts(blob_bytes), self.link)
        placement = config.placement(trace.layers, trace.experts, trace.top_k)
        self.expert_cache = ExpertCache(placement, config.slots, maker(config), memory)
        self.expert_cache.prefetch_by(None, prefetch)
        self.expert_cache.pin(config.pinned)
        if start == "filled":
            self.expert_cache.fill()
        self.expert_cache.take_counts()
        self.link.restart()
        self.link.load_s = clock.load_ms / 1e3
        self.sums: dict[Phase, Sums] = {"prefill": Sums(), "decode": Sums()}
        self.decoded = list[DecodedToken]()
        self._token = 0  # the number of the next one
        self.recalled = np.zeros((2, trace.layers))  # [predicted and chosen, chosen] of decoded tokens by layer
        self._layer_s = clock.layer_ms(trace.layers, trace.top_k) / 1e3
        self._prefetch_cost = PrefetchCost()
        self._predicted: dict[int, list[int]] = {}  # layer -> its last prediction, best first

    def run(self) -> dict[Phase, Sums]:
        """Replays the whole trace."""
        for ids, chunk, at, tokens in passes(self.trace):
            if isinstance(self.predictor, Replayed):
                self.predictor.follow(chunk, at)
            view = TraceView(self.trace, chunk, at, tokens, self.profile)
            self._pass(distinct(ids), ids, view, "decode" if chunk.decode[at] else "prefill")
        self.predictor.close()
        return self.sums

    def blocks(self) -> tuple[Block, ...]:
        """Milliseconds per decoded token in each part of the trace."""
        tokens, took_ms = np.zeros(BLOCKS, np.int64), np.zeros(BLOCKS)
        at = block_of(np.array([one.at for one in self.decoded], np.int64), self.trace.tokens)
        np.add.at(tokens, at, 1)
        np.add.at(took_ms, at, [one.ms for one in self.decoded])
        return tuple(Block(n, ms / max(1, n)) for n, ms in zip(tokens.tolist(), took_ms.tolist(), strict=True))

    def _pass(self, wanted: list[list[list[int]]], ids: Ints, view: TraceView, phase: Phase) -> None:
        expert_cache, link, sums = self.expert_cache, self.link, self.sums[phase]
        expert_cache.begin_pass(phase, len(ids))
        self._prefetch_cost.begin()
        began_s, stalled_s = link.now_s(), sums.stall_s
        before, recalled = list(sums.outcomes), self.recalled[0].sum()
        if self.predictor.starts:
            self._prefetch(self.predictor.begin(view), -1)
        for layer in range(self.trace.layers):
            link.advance(self._layer_s)
            view.reach(layer)
            (asked,) = wanted[layer]
            if expert_cache.has_pending_prefetches:
                expert_cache.arrive(layer, asked)
            self._remember(layer, asked, phase)
            if len(ids) == 1:
                lease = expert_cache.acquire(layer, asked)
                self._look(view)
                self._compute(lease, sums)
                expert_cache.release(lease)
            else:
                for lease in expert_cache.in_waves(
                    layer, ids[:, layer], asked, expert_cache.release, lambda: self._look(view)
                ):
                    self._compute(lease, sums)
        link.advance(self.clock.head_ms / 1e3)
        sums.passes, sums.tokens = sums.passes + 1, sums.tokens + len(ids)
        sums.compute_s += link.now_s() - began_s - (sums.stall_s - stalled_s)
        if phase == "decode" and len(ids) == 1:
            new = [now - then for now, then in zip(sums.outcomes, before, strict=True)]
            self.decoded.append(
                DecodedToken(
                    self._token,
                    (link.now_s() - began_s) * 1e3,
                    sum(new),
                    sum(new[each] for each in BY_NAME["hits"].outcomes),
                    int(self.recalled[0].sum() - recalled),
                )
            )
        self._token += len(ids)
        counts = expert_cache.take_counts()
        sums.counts.add(counts)
        sums.net_ms += self._prefetch_cost.net_ms(
            counts, link.take_finished(), self._prefetch_cost.late_s, sums.stall_s - stalled_s
        )

    def _look(self, view: TraceView) -> None:
        if self.predictor.looks:
            self._prefetch(self.predictor.predict(view), view.layer)
            self._prefetch_cost.predict_s += self.clock.predict_ms / 1e3
            self.link.advance(self.clock.predict_ms / 1e3)

    def _prefetch(self, predictions: Sequence[Prediction], at: int) -> None:
        self.expert_cache.prefetch(predictions, at, self.predictor.take_maps(), self.predictor.priority)
        for layer in dict.fromkeys(prediction.layer for prediction in predictions):
            named = [prediction for prediction in predictions if prediction.layer == layer]
            self._predicted[layer] = [
                prediction.expert for prediction in sorted(named, key=lambda prediction: -prediction.score)
            ]

    def _remember(self, layer: int, asked: Sequence[int], phase: Phase) -> None:
        """Recall@k: compares the first k of the layer's last prediction with its requests."""
        predicted = self._predicted.pop(layer, ())
        if phase == "decode" and self.predictor.looks:
            self.recalled[:, layer] += len(set(predicted[: self.trace.top_k]) & set(asked)), len(asked)

    def _compute(self, lease: Lease, sums: Sums) -> None:
        """Computes the resident experts, then each missing one as it lands."""
        one_s, extra_s = self.clock.expert_ms / 1e3, self.clock.miss_ms / 1e3
        waiting = [leased for leased in lease.segments if leased.ticket is not None]
        for leased in lease.segments:
            sums.outcomes[leased.outcome] += 1
        self.link.advance((len(lease.segments) - len(waiting)) * one_s)
        for leased in waiting:
            assert leased.ticket is not None
            waited_s = self.link.wait(leased.ticket)
            sums.stall_s += waited_s
            if leased.outcome == Outcome.PARTIAL_HIT:
                self._prefetch_cost.late_s += waited_s
            self.link.advance(one_s + extra_s)


def passes(trace: Trace) -> Iterator[tuple[Ints, Chunk, int, slice]]:
    """Yields every pass: its ids [n, L, k], its chunk, its index in the chunk, and the slice of its tokens there."""
    for chunk in trace.chunks():
        ends = chunk.sizes.cumsum().tolist()
        for at, (end, size) in enumerate(zip(ends, chunk.sizes.tolist(), strict=True)):
            yield chunk.ids[end - size : end], chunk, at, slice(end - size, end)


def distinct(rows: npt.NDArray[Any]) -> list[list[list[int]]]:
    """[n, L, k] ids of a pass -> [L][1][...] distinct experts of each layer, in the order in which the engine requests
    them."""
    if len(rows) == 1:
        return [[list(dict.fromkeys(row))] for row in rows[0].tolist()]
    return [[np.unique(rows[:, layer]).tolist()] for layer in range(rows.shape[1])]
