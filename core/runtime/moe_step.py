"""One MoE layer from start to end: fetches the experts that the router chose, computes them and reports the layer.

A step replaces transformers' experts modules. It receives (hidden [T, H], ids [T, k], weights [T, k]) after the model's
own router and returns [T, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease, LeasedSegment, SkippedRequest, in_waves
from core.memory.codec.native.threads import MOST
from core.runtime.batch import Batch
from core.runtime.compute import ExpertMath
from core.runtime.expert_rows import PairRows, PromptRows, TokenRows, token_at_rest
from core.runtime.miss import MissPolicy
from core.runtime.prefetcher import Prefetcher
from core.runtime.processor import DeviceProcessor
from core.runtime.routed import Routed, distinct
from core.runtime.split_rows import SplitTokenRows


class LayerMetrics(Protocol):
    """What a layer reports: to `core.runtime.recorder.Recorder`, or to `core.runtime.unrecorded.Unrecorded`."""

    def layer(
        self, layer: int, ids: list[list[int]], requests: Sequence[LeasedSegment | SkippedRequest] | None
    ) -> None:
        """The router's choice [T][k], and the outcome of each distinct expert's request; None = the experts of one
        token, all of them hits."""


class MoEStep:
    """All MoE layers of a model, for the passes of one pipeline. Without `prefetcher` nothing is prefetched; without
    `miss` every missing expert is waited for."""

    def __init__(
        self,
        math: Sequence[ExpertMath],
        expert_cache: ExpertCache,
        processor: DeviceProcessor,
        metrics: LayerMetrics,
        prefetcher: Prefetcher | None = None,
        miss: MissPolicy | None = None,
    ) -> None:
        self.processor = processor
        self._math, self._expert_cache, self._metrics = math, expert_cache, metrics
        self._prefetcher, self._miss = prefetcher, miss
        self._has_idle = any(one.has_idle for one in math)
        self._in_blocks = any(one.codec.blocks > 1 for one in math)
        self._beside = any(one.codec.device.type == "cuda" for one in math)
        self._plain = not (self._in_blocks or self._beside)  # whole experts, computed by this thread
        self._by_row = False  # the running pass computes one token of each sequence, each row by itself
        self._rests = False  # ... or what the router chose, of one sequence, by this thread, and prefetches nothing
        self._tap: Callable[[torch.Tensor], None] | None = None

    def begin(self, batch: Batch) -> None:
        """A pass begins, all of whose layers are computed alike, until `end`."""
        self._by_row = batch.phase == "decode" and (batch.by_row or len(batch.shares) > 1)
        self._rests = (
            self._plain
            and not self._by_row
            and not (self._prefetcher is not None and self._prefetcher.looks)
            and not (self._miss is not None and self._miss.active)
        )

    def end(self) -> None:
        """The pass is over, or broke off."""
        self._by_row = self._rests = False

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute resident experts first, then each missing one as it lands; [T, H]."""
        asked: list[list[int]] = ids.tolist()  # the layer's only synchronisation with the device
        if self._rests and len(asked) == 1:
            segments = self._expert_cache.lookup_all_hits(layer, asked[0])
            if segments is not None:
                result = token_at_rest(self._math[layer], segments, hidden, asked[0], weights, self._tap)
                self._metrics.layer(layer, asked, None)
                return result
        routed = self._route(layer, ids, weights, asked)
        if self._expert_cache.has_pending_prefetches:
            self._expert_cache.arrive(layer, routed.wanted)
        result, requests = (self._token if len(routed.chosen) == 1 else self._prompt)(layer, hidden, routed)
        self._metrics.layer(layer, routed.asked, routed.requests(requests))
        return result

    def _rows(
        self, layer: int, hidden: torch.Tensor, routed: Routed
    ) -> TokenRows | PromptRows | SplitTokenRows | PairRows:
        """How the rows of a layer are computed."""
        tokens, math = len(routed.chosen), self._math[layer]
        if self._by_row and math.row_products is not None and tokens * len(routed.chosen[0]) <= MOST:
            return PairRows(math, hidden, routed)
        if tokens > 1:
            return PromptRows(math, hidden, routed)
        split = self._in_blocks and not self._expert_cache.keeps_whole
        return (SplitTokenRows if split else TokenRows)(math, hidden, routed)

    @contextmanager
    def tapped(self, tell: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Inside, `tell` gets every layer's pairs: [T * k, H], each expert's output before its weight."""
        self._tap = tell
        try:
            yield
        finally:
            self._tap = None

    def _route(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: list[list[int]]) -> Routed:
        """The router's choice, or what the miss policy makes of it."""
        if self._miss is not None and self._miss.active:
            return self._miss.route(layer, ids, weights, asked)
        routed = Routed(ids, weights, asked, distinct(asked), asked)
        # with one token, each expert is computed once anyway
        return routed.without_idle() if self._has_idle and len(asked) > 1 else routed

    def _token(self, layer: int, hidden: torch.Tensor, routed: Routed) -> tuple[torch.Tensor, list[LeasedSegment]]:
        """The wanted experts of one token [1, H]. Later layers' experts are prefetched before they are computed; where
        the device computes beside this thread, once it has the resident ones to compute."""
        lease = self._expert_cache.acquire(layer, routed.wanted)
        if not self._beside:
            self._prefetch(layer, routed)
        rows = self._rows(layer, hidden, routed)
        meanwhile = (lambda: self._prefetch(layer, routed)) if self._beside else None
        self.processor.compute(lease.segments, rows, meanwhile)
        self._release(lease)
        return rows.combined(self._tap), lease.requests

    def _prompt(self, layer: int, hidden: torch.Tensor, routed: Routed) -> tuple[torch.Tensor, list[LeasedSegment]]:
        """The wanted experts of several tokens [T, H], in waves where they need more than there are slots. Later
        layers' experts are prefetched once nothing more has to be fetched for this one."""
        rows, requests = self._rows(layer, hidden, routed), list[LeasedSegment]()
        for lease in in_waves(
            self._expert_cache, layer, routed.wanted, self._release, lambda: self._prefetch(layer, routed)
        ):
            self.processor.compute(lease.segments, rows)
            requests += lease.requests
        return rows.combined(self._tap), requests

    def _prefetch(self, layer: int, routed: Routed) -> None:
        if self._prefetcher is not None:
            self._prefetcher.look_ahead(layer, *routed.shown)

    def _release(self, lease: Lease) -> None:
        self._expert_cache.release(lease, self.processor.fence() if self._beside else None)
