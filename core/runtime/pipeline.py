"""Runs forward passes of a loaded model. Two pipelines share one model and one expert cache: answers run one, with
prediction, lossy options and recording; measuring runs another, which has none of these.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from core.hf.discover import ExpertsSite
from core.hf.packed_texts import AnyPacking
from core.hf.quantized_linear import CodedLayers
from core.runtime.batch import Batch, compute
from core.runtime.device_decode import DeviceDecode
from core.runtime.moe_step import MoEStep
from core.runtime.program.gpu.program import GpuProgram
from core.runtime.program.program import Hits, Program
from core.runtime.token_graph import ProgramPass
from core.runtime.warmup import Threads


class Stopped(Exception):
    """Raised inside a pass that was cancelled."""


Stop = Callable[[], bool]
Step = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, hidden [T, H], ids [T, k], weights [T, k]) -> [T, H]."""


class StepDispatch:
    """What the model calls in place of its experts: hands every MoE layer to the step of the pipeline whose pass is
    running. A pass that belongs to no pipeline is computed by `usual`."""

    def __init__(self, usual: Step) -> None:
        self.usual = usual
        self._step: Step | None = None
        self._stop: Stop | None = None
        self._progress: Callable[[int], None] | None = None

    def __call__(
        self, site: ExpertsSite, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if self._progress is not None:
            self._progress(site.index)
        if self._stop is not None and self._stop():
            raise Stopped
        return (self._step or self.usual)(site.index, hidden, ids, weights)

    @contextmanager
    def to(self, step: Step, stop: Stop | None = None, progress: Callable[[int], None] | None = None) -> Iterator[None]:
        """Inside, `step` computes. Before the experts of each MoE layer `progress` gets its index, and the pass raises
        Stopped where `stop()`."""
        before = self._step, self._stop, self._progress
        self._step, self._stop, self._progress = step, stop, progress
        try:
            yield
        finally:
            self._step, self._stop, self._progress = before


@dataclass(frozen=True, slots=True)
class HookedModel:
    """A model whose experts modules call `dispatch`. `packing`: how several sequences are computed in one pass."""

    model: Any
    device: torch.device
    dispatch: StepDispatch
    packing: AnyPacking
    program: Program | GpuProgram | None = (
        None  # what computes passes in the fast arithmetic; None: transformers' modules
    )
    fast_experts: bool = False  # the experts are computed in it, with a program or without
    fallback: str = ""  # why there is no program, or not even that, where one was chosen; for the user
    coded: CodedLayers = field(default_factory=CodedLayers)  # the model's layers that are kept as codes

    def compute(self, batch: Batch, keep: int = 1, hits: Hits | None = None) -> torch.Tensor:
        """Compute the batch -> logits [keep, V] of the last rows of each share, one share after the other. `hits` as in
        `Program.compute`."""
        self.coded.fast = self.fast_experts
        if self.program is not None:
            return self.program.compute(batch, keep, self.dispatch, hits)
        return compute(self.model, self.device, batch, keep, self.packing)

    @property
    def by_position(self) -> ProgramPass | None:
        """A program's pass over one token of which the host knows nothing; None where none computes on a GPU."""
        program, dispatch = self.program, self.dispatch
        if not isinstance(program, GpuProgram):
            return None
        return lambda kv, token, position, most: program.token(kv, token, position, most, dispatch)


class Pipeline:
    """One way of running passes, on one thread at a time: `begin`, then `forward`."""

    def __init__(
        self, hooked: HookedModel, step: MoEStep, threads: Threads, device_decode: DeviceDecode | None = None
    ) -> None:
        self.hooked, self.step, self.threads = hooked, step, threads
        self._device_decode = device_decode

    def announce(self, *shares: tuple[int, Sequence[int]]) -> None:
        """The tokens of some requests in coming passes are known, while this one still runs or before the first."""
        if self.step.prefetcher is not None:
            self.step.prefetcher.announce(shares)

    def begin(self, batch: Batch) -> None:
        """A pass begins: sets the thread counts, and prefetches what is predicted before the first routing."""
        self.threads.use(batch.phase, batch.size)
        self.step.expert_cache.begin_pass(batch.phase, batch.size)
        self.step.sink.begin(batch)
        if self.step.prefetcher is not None:
            self.step.prefetcher.begin(batch)

    def forward(
        self,
        batch: Batch,
        keep: int = 1,
        stop: Stop | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        settles: bool = True,
    ) -> torch.Tensor:
        """Compute the batch -> logits [keep, V] of the last rows of each share, one share after the other. `stop` and
        `progress` as in `StepDispatch.to`; after Stopped, what the KV holds of the pass is of no use. Where it does not
        `settle`, the caller does so."""
        hooked, device_decode = self.hooked, self._device_decode
        if stop is not None and stop():  # what computes a token in one call does not ask
            raise Stopped
        if device_decode is not None and (logits := device_decode.taken(batch)) is not None:
            return logits
        if keep == 1 and device_decode is not None and (step := device_decode.step_for(batch)) is not None:
            with step.token(), hooked.dispatch.to(step, stop, progress):
                logits = device_decode.compute(batch, lambda: hooked.compute(batch, keep))
            if settles:
                self.settle()
            return logits
        self.step.begin(batch)
        try:
            with hooked.dispatch.to(self.step, stop, progress):
                return hooked.compute(batch, keep, self.step)
        finally:
            self.step.end()

    def settle(self, follows: Batch | None = None) -> None:
        """After a pass, whose logits were taken: the cache is told of it, if it was not. A pass over a token that
        `follows` is launched before, where that is possible, so that the device does not wait for what the host does
        until it asks for it."""
        if self._device_decode is not None:
            if follows is not None:
                self._device_decode.launch_ahead(follows)
            self._device_decode.settle()

    def recall(self) -> None:
        """What was launched ahead is waited for, and of no use: slots, KV or settings are to change."""
        if self._device_decode is not None:
            self._device_decode.recall()

    def end(self) -> None:
        """Also after a pass that was aborted: ends its leases, and frees the threads for other work."""
        self.recall()
        self.step.expert_cache.abandon()
        self.threads.rest()
