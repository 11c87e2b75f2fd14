"""Runs forward passes of a loaded model. Two pipelines share one model and one expert cache: answers run one, with
prediction, lossy options and recording; measuring runs another, which has none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from core.cache.expert_cache import ExpertCache
from core.hf import ExpertsSite
from core.hf.packed_texts import AnyPacking
from core.runtime.batch import Batch, compute
from core.runtime.device_decode import DeviceDecode
from core.runtime.moe_step import MoEStep
from core.runtime.prefetcher import Prefetcher
from core.runtime.step_sink import StepSink
from core.runtime.warmup import Threads


class Stopped(Exception):
    """Raised inside a pass that nobody wants any more."""


Stop = Callable[[int], bool]
Step = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, hidden [T, H], ids [T, k], weights [T, k]) -> [T, H]."""


class StepDispatch:
    """What the model calls in place of its experts: hands every MoE layer to the step of the pipeline whose pass is
    running. A pass that belongs to no pipeline is computed by `usual`."""

    def __init__(self, usual: Step) -> None:
        self._step = usual
        self._stop: Stop | None = None

    def __call__(
        self, site: ExpertsSite, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if self._stop is not None and self._stop(site.index):
            raise Stopped
        return self._step(site.index, hidden, ids, weights)

    @contextmanager
    def to(self, step: Step, stop: Stop | None = None) -> Iterator[None]:
        """Inside, `step` computes; when `stop(layer)`, a pass raises Stopped before the experts of that MoE layer."""
        before = self._step, self._stop
        self._step, self._stop = step, stop
        try:
            yield
        finally:
            self._step, self._stop = before


class Pipeline:
    """One way of running passes, on one thread at a time: `begin`, then `forward`."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        dispatch: StepDispatch,
        step: MoEStep,
        expert_cache: ExpertCache,
        threads: Threads,
        sink: StepSink,
        packing: AnyPacking,
        prefetcher: Prefetcher | None = None,
        device_decode: DeviceDecode | None = None,
    ) -> None:
        self._device_decode = device_decode
        self.step, self.prefetcher, self._packing = step, prefetcher, packing
        self._model, self._device, self._dispatch = model, device, dispatch
        self._expert_cache, self._threads, self._sink = expert_cache, threads, sink

    def announce(self, *shares: tuple[int, Sequence[int]]) -> None:
        """The tokens of some requests in coming passes are known, while this one still runs or before the first."""
        if self.prefetcher is not None:
            self.prefetcher.announce(shares)

    def begin(self, batch: Batch) -> None:
        """A pass begins: sets the thread counts, and prefetches what is predicted before the first routing."""
        self._threads.use(batch.phase, batch.size)
        self._expert_cache.begin_pass(batch.phase, batch.size)
        self._sink.begin(batch)
        if self.prefetcher is not None:
            self.prefetcher.begin(batch)

    def forward(self, batch: Batch, keep: int = 1, stop: Stop | None = None) -> torch.Tensor:
        """Compute the batch -> logits [keep, V] of the last rows of each share, one share after the other. `stop` is
        asked before each MoE layer's experts, with its index; when it says yes, the pass raises Stopped, and what the
        KV then holds of it is of no use."""
        if keep == 1 and self._device_decode is not None and (step := self._device_decode.step_for(batch)) is not None:
            if stop is not None and stop(0):  # a graph asks nobody
                raise Stopped
            with step.token(), self._dispatch.to(step, stop):
                return self._device_decode.compute(
                    batch, lambda: compute(self._model, self._device, batch, keep, self._packing)
                )
        self.step.begin(batch)
        try:
            with self._dispatch.to(self.step, stop):
                return compute(self._model, self._device, batch, keep, self._packing)
        finally:
            self.step.end()

    def end(self) -> None:
        """Also after a pass that broke off: ends its leases, and frees the threads for other work."""
        self._expert_cache.abandon()
        self._threads.use("prefill")
