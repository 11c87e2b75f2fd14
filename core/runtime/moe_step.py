"""One MoE layer from start to end: fetches the experts that the router chose, computes them and reports the layer.

A step replaces transformers' experts modules. It receives (hidden [T, H], ids [T, k], weights [T, k]) after the model's
own router and returns [T, H].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease, LeasedSegment
from core.memory.transfer import TransferEngine
from core.policy.predict.base import RouterPlan
from core.runtime.batch import Batch
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.host_compute import HostCompute, Rows
from core.runtime.miss import MissPolicy
from core.runtime.prefetcher import Prefetcher
from core.runtime.product import Product
from core.runtime.program.experts import FastMath
from core.runtime.program.few import FewRows, fast_all_hits
from core.runtime.program.gpu.rows import GpuMath, GpuRows
from core.runtime.program.many import FastRows
from core.runtime.program.routers import Answers
from core.runtime.program.row_steps import ROWS
from core.runtime.rows import ExpertRows, Routed, compute_all_hits, distinct
from core.runtime.step_sink import StepSink
from core.types import Outcome


class MoEStep:
    """All MoE layers of a model, for the passes of one pipeline. Without `prefetcher` nothing is prefetched; without
    `miss` no missing expert is replaced, and without `host` none is computed elsewhere."""

    def __init__(
        self,
        math: Sequence[ExpertMath],
        expert_cache: ExpertCache,
        transfers: TransferEngine,
        sink: StepSink,
        prefetcher: Prefetcher | None = None,
        miss: MissPolicy | None = None,
        host: HostCompute | None = None,
    ) -> None:
        self.math, self.expert_cache, self.transfers, self.sink = math, expert_cache, transfers, sink
        self.prefetcher, self.miss, self.host = prefetcher, miss, host
        self._on_gpu = math[0].codec.device.type == "cuda"  # which computes while this thread goes on
        self._idle = any(one.has_idle for one in math)  # experts of weight 0 are not computed, of several rows
        self.routers: RouterPlan | None = None  # that the predictor has the program ask in the pass
        self._tap: Tap | None = None
        self._hearing: Prefetcher | None = None
        self.end()

    @property
    def _fast(self) -> bool:
        """Whether this is the fast arithmetic, which a load may give up."""
        return isinstance(self.math[0], FastMath)

    def begin(self, batch: Batch) -> None:
        """A pass begins, all of whose layers are computed alike, until `end`."""
        prefetcher, miss = self.prefetcher, self.miss
        self._prefetcher = prefetcher if prefetcher is not None and prefetcher.active else None
        self._hearing = self._prefetcher if self._prefetcher is not None and self._prefetcher.hears else None
        self._miss = miss if miss is not None and miss.active else None
        self._host = self.host if self.host is not None and self.host.begun() else None
        self.routers = self._prefetcher.routers if self._prefetcher is not None else None
        alone = not (self._on_gpu or self._miss is not None)
        whole = batch.size == 1 or not self._idle  # every expert that is chosen is computed
        self._looks_up = alone and whole and self._prefetcher is None
        self._skips = alone and self._prefetcher is not None and self._prefetcher.skips
        if self._hearing is not None:
            self._hearing.leave_cache(-1)

    def end(self) -> None:
        """The pass is over, or was aborted. Layers of no pass are computed in the general way."""
        self._prefetcher, self._miss = self.prefetcher, self.miss
        if self.host is not None:
            self.host.abandon()
        self._host = None  # what computes missing experts of the pass where they lie
        self._looks_up = False  # the experts may all be hits, and then nothing else is to be done
        self._skips = False  # ... where all that is predicted is there, too
        self.routers = None
        hearing, self._hearing = self._hearing, None  # the prefetcher, in a pass in which a worker's answers prefetch
        if hearing is not None:
            hearing.take_cache()

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute resident experts first, then each missing one as it lands; [T, H]."""
        asked: list[list[int]] = ids.tolist()  # the layer's only synchronisation with the device
        if self._hearing is not None:
            self._hearing.take_cache()
        if self._looks_up and len(asked) == 1:
            segments = self.expert_cache.lookup_all_hits(layer, asked[0])
            if segments is not None:
                compute = fast_all_hits if self._fast else compute_all_hits
                result = compute(self.math[layer], segments, hidden, asked[0], weights, self._tap)
                self.sink.layer(layer, asked, None)
                return result
        routed = self._route(layer, ids, weights, asked)
        if self.expert_cache.has_pending_prefetches:
            self.expert_cache.arrive(layer, routed.wanted)
        one = len(routed.chosen) == 1
        rows = self._rows(len(routed.chosen))(self.math[layer], self._product(layer, routed), hidden, routed)
        if not one and self._host is not None and self._host.takes_rows:
            requests = self._rows_in_place(self._host, layer, rows, routed)
        elif not one:
            requests = self._prompt(layer, rows, routed)
        elif self._host is None:
            requests = self._token(layer, rows, routed)
        else:
            requests = self._token_beside(self._host, layer, rows, routed, hidden)
        result = rows.combined(self._tap)
        self.sink.layer(layer, routed.asked, routed.requests(requests))
        return result

    def _rows(self, count: int) -> Callable[[ExpertMath, Product, torch.Tensor, Routed], Rows]:
        """What computes the experts of so many rows."""
        if isinstance(self.math[0], GpuMath):
            return partial(GpuRows, keeps=self._tap is not None)
        if not self._fast:
            return ExpertRows
        return FewRows if count <= ROWS else FastRows

    def hits_at(self) -> int:
        """As `ExpertCache.hits_at`, in a pass in which layers whose experts are all hits ask for nothing else; 0
        otherwise."""
        if not (self._looks_up or self._skips) or self._tap is not None or not self._fast:
            return 0
        return self.expert_cache.hits_at()

    def answered(self, layer: int, answers: Answers) -> None:
        """What `routers` would choose, given the state of the layer that is computed next."""
        if self._prefetcher is not None:
            self._prefetcher.answered(layer, answers)

    def computed(self, first: int, chosen: Sequence[list[list[int]]]) -> None:
        """The experts [T][k] chosen in each layer from the `first` on were computed in the slots of `hits_at`."""
        if len(chosen[0]) > 1:
            for layer, rows in enumerate(chosen, first):
                self.expert_cache.count_hits(layer, [distinct(rows)], rows)
        else:
            wanted = [ids for (ids,) in chosen]
            self.expert_cache.count_hits(first, wanted)
            if self._prefetcher is not None:
                self._prefetcher.passed(first, wanted)
        for layer, rows in enumerate(chosen, first):
            self.sink.layer(layer, rows, None)

    def _product(self, layer: int, routed: Routed) -> Product:
        """How the rows of a layer are computed."""
        math, tokens = self.math[layer], len(routed.chosen)
        if tokens > 1:
            return math.prompt
        return math.token if math.blocks is None or self.expert_cache.keeps_whole else math.blocks

    @contextmanager
    def tapped(self, tap: Tap) -> Iterator[None]:
        """Inside, `tap` gets every layer's pairs: [T * k, H], each expert's output before its weight."""
        self._tap = tap
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
        return routed.without_idle() if len(asked) > 1 and self.math[layer].has_idle else routed

    def _token(self, layer: int, rows: Rows, routed: Routed) -> list[LeasedSegment]:
        """Lease and compute the wanted experts of one token. Later layers' experts are prefetched before that; on a
        GPU, which computes while this thread goes on, once it has the resident ones to compute."""
        lease = self.expert_cache.acquire(layer, routed.wanted)
        ahead = self._on_gpu  # whether later layers' are still to be prefetched
        if not ahead:
            self._prefetch(layer, routed)
        for batch in rows.batches(lease.segments):
            if ahead and batch[0].ticket is not None:
                self._prefetch(layer, routed)
                ahead = False
            self._compute(rows, batch)
        if ahead:
            self._prefetch(layer, routed)
        self._release(lease)
        return lease.requests

    def _token_beside(
        self, host: HostCompute, layer: int, rows: Rows, routed: Routed, hidden: torch.Tensor
    ) -> list[LeasedSegment]:
        """As `_token`, with a host that computes missing experts meanwhile. A CPU takes part in that before it computes
        what was copied; a GPU is told of all it has to compute first."""
        lease = self.expert_cache.acquire(layer, routed.wanted, host.choose)
        segments = host.begin(lease, hidden)
        if not self._on_gpu:
            self._prefetch(layer, routed)
        for batch in rows.batches([one for one in segments if one.ticket is None]):
            self._compute(rows, batch)
        host.computed_residents()
        if self._on_gpu:
            self._prefetch(layer, routed)
        elif lease.hosted:
            self.sink.hosted(*host.end(rows, lease.hosted))
        for batch in rows.batches([one for one in segments if one.ticket is not None]):
            self._compute(rows, batch)
        if self._on_gpu and lease.hosted:
            self.sink.hosted(*host.end(rows, lease.hosted))
        self._release(lease)
        return lease.requests

    def _rows_in_place(self, host: HostCompute, layer: int, rows: Rows, routed: Routed) -> list[LeasedSegment]:
        """As `_prompt`, with so many missing experts computed where they lie that the others fit in slots."""
        lease = self.expert_cache.acquire_for_rows(layer, routed.chosen, routed.wanted, host.choose_of_rows)
        self._prefetch(layer, routed)
        for batch in rows.batches(host.in_place(lease)):
            self._compute(rows, batch)
        host.end(rows, lease.hosted)
        self._release(lease)
        return lease.requests

    def _prompt(self, layer: int, rows: Rows, routed: Routed) -> list[LeasedSegment]:
        """Lease and compute the wanted experts of several tokens, in waves where they need more than there are slots.
        Later layers' experts are prefetched once nothing more has to be fetched for this one."""
        requests: list[LeasedSegment] = []
        for lease in self.expert_cache.in_waves(
            layer, routed.chosen, routed.wanted, self._release, lambda: self._prefetch(layer, routed)
        ):
            for batch in rows.batches(lease.segments):
                self._compute(rows, batch)
            requests += lease.requests
        return requests

    def _compute(self, rows: Rows, batch: Sequence[LeasedSegment]) -> None:
        """Compute segments as soon as their copies have landed; those of a few rows do not wait for each other."""
        if not isinstance(rows, FewRows):
            for leased in batch:
                self._wait(leased)
            rows.compute(batch)
            return
        while batch:
            self._wait(batch[0])
            there, late = [batch[0]], list[LeasedSegment]()
            for leased in batch[1:]:
                is_there = leased.ticket is None or self.transfers.landed(leased.ticket)
                (there if is_there else late).append(leased)
            rows.compute(there)
            batch = late

    def _wait(self, leased: LeasedSegment) -> None:
        """Return when a segment is in its slots."""
        if leased.ticket is not None:
            seconds = self.transfers.wait(leased.ticket)
            self.sink.waited(seconds, late=leased.outcome == Outcome.PARTIAL_HIT)

    def _prefetch(self, layer: int, routed: Routed) -> None:
        if self._prefetcher is not None:
            self._prefetcher.look_ahead(layer, *routed.shown)
        if self._hearing is not None:
            self._hearing.leave_cache(layer)

    def _release(self, lease: Lease) -> None:
        """End a lease: on a GPU, once it has computed all that was launched so far."""
        with nullcontext() if self._hearing is None else self._hearing.cache_lock:
            self.expert_cache.release(lease, self.transfers.fence() if self._on_gpu else None)
