"""Measurement session: forward passes of a loaded model outside any answer, with access to every MoE layer's results.

Passes run through a pipeline of their own over the engine's cache and experts: they are exact, need no memory beyond an
answer's, and nothing is predicted, recorded or shown.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from core.hf.discover import ExpertsSite
from core.hf.watch import Seen, watch
from core.runtime.batch import Batch, Share
from core.runtime.kv_cache import KVCache
from core.runtime.pipeline import Pipeline
from core.runtime.sequence_kv import SequenceKV
from core.types import ModelShape, Phase


class Preempted(Exception):
    """Raised inside a pass that was stopped because another caller wants the model."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """The results of one MoE layer in a pass over T tokens. The tensors belong to the pass: clone what is kept."""

    seen: Seen  # the router's call; `seen.layer` is the layer's index
    ids: torch.Tensor  # int64 [T, k] experts that were computed
    weights: torch.Tensor  # [T, k] as passed to the experts
    outs: torch.Tensor  # [T * k, H] output of each expert, before its weight; ordered by token
    given: torch.Tensor  # [T, H] input of the experts


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What one pass may be."""

    context: int  # capacity of one KV cache in tokens
    chunk: int  # most tokens of one pass
    carried: bool = True  # a pass can continue from the state the one before left; if not, a prompt must be one pass
    workspace: int = 0  # bytes available to a pass for activations


class MeasurementSession:
    """Built by `Engine.workbench`, which holds the model lock for its lifetime."""

    def __init__(
        self, pipeline: Pipeline, sites: Sequence[ExpertsSite], shape: ModelShape, kv: KVCache, limits: PassLimits
    ) -> None:
        self.pipeline, self.sites, self.shape, self.kv = pipeline, sites, shape, kv
        self.context, self.chunk, self.carried = limits.context, limits.chunk, limits.carried
        self.workspace = limits.workspace
        self.model, self.device, self.threads = pipeline.hooked.model, pipeline.hooked.device, pipeline.threads
        self.expert_cache, self.transfers = pipeline.step.expert_cache, pipeline.step.transfers
        self._counted = True  # whether passes left anything in the counters

    def run(self, tokens: Sequence[int], kv: SequenceKV, phase: Phase = "prefill", keep: int = 1) -> torch.Tensor:
        """One pass over tokens [T], at most `chunk`, that follow what `kv` holds -> logits [keep, V] of the last
        ones."""
        batch = self._begin(phase, Share(tokens, kv))
        return self.pipeline.forward(batch, keep)

    @contextmanager
    def watched(
        self, on_layer: Callable[[LayerRun], None], on_embedding: Callable[[torch.Tensor], None]
    ) -> Iterator[None]:
        """Inside, `on_layer` is called after every MoE layer, in order, and `on_embedding` with the embedding's output
        [T, H] before the first. Both are called within the pass, on its thread."""
        seen: list[Seen] = []
        outs: list[torch.Tensor] = []

        def ran(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            run = LayerRun(
                seen.pop(),
                args[1].reshape(-1, args[1].shape[-1]),
                args[2].reshape(-1, args[2].shape[-1]),
                outs.pop(),
                args[0].reshape(-1, args[0].shape[-1]),
            )
            on_layer(run)

        with ExitStack() as hooks, self.pipeline.step.tapped(outs.append):
            hooks.enter_context(watch(self.model, self.sites, seen.append, on_embedding))
            for site in self.sites:
                hooks.enter_context(site.module.register_forward_hook(ran))
            yield

    @torch.inference_mode()
    def outputs(self, layer: int, given: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
        """[T, n, H] outputs of n experts of a layer for inputs [T, H], before any weight. T is at least 2, and T * n at
        most chunk * k, which is what a pass computes. Not allowed inside `watched`."""
        self._begin("prefill", Share(range(len(given))))
        self.threads.use("prefill")  # as many rows as a whole chunk has
        ids = torch.tensor([list(experts)], device=self.device).expand(len(given), -1)
        outs: list[torch.Tensor] = []
        with self.pipeline.step.tapped(outs.append):
            self.pipeline.step(layer, given, ids, torch.ones_like(ids, dtype=given.dtype))
        return outs[0].view(len(given), len(experts), -1)

    @contextmanager
    def unpaced(self) -> Iterator[None]:
        """Inside, link emulation is off: for passes whose time is not measured."""
        self.transfers.hurried = True
        try:
            yield
        finally:
            self.transfers.hurried = False

    @contextmanager
    def interruptible(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Inside, a pass raises Preempted before the next MoE layer's experts as soon as `stop()`."""

        def look(*_: object) -> None:
            if stop():
                raise Preempted

        with ExitStack() as hooks:
            for site in self.sites:
                hooks.enter_context(site.module.register_forward_pre_hook(look))
            yield

    @contextmanager
    def borrowed_cache(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Inside, passes leave no trace in the cache, its counts or the link's measurements: most experts stay
        resident, and evicted ones are fetched back afterwards, until `stop()`. Only while the cache is `quiet`."""
        noted = self.transfers.set_aside()
        reservation = self.expert_cache.reserve_slots(2 * self.shape.top_k)
        with self.unpaced():
            try:
                yield
            finally:
                self.expert_cache.restore(reservation, stop)
                self.transfers.put_back(noted)
                self._counted = False

    def start_over(self) -> None:
        """Reset the cache to its state after a load."""
        with self.unpaced():
            self.expert_cache.start_over()

    def missed(self) -> bool:
        """Whether the last pass fetched an expert on demand."""
        return self.expert_cache.counts.demand_bytes > 0

    def stall_ms(self) -> float:
        """How long the last pass waited for copies. Call once per pass, when the device is idle."""
        return (self.pipeline.step.sink.stall_s + self.transfers.device_stall_s()[0]) * 1e3

    def has_room(self, experts: int) -> bool:
        """Whether that many experts of every layer fit into the slots at once, without the pinned ones."""
        layers = range(self.shape.layers)
        sharing = len(layers) // len({id(self.expert_cache.pool(layer)) for layer in layers})
        return all(self.expert_cache.capacity_for(layer) >= experts * sharing for layer in layers)

    def close(self) -> None:
        """Call after the last pass, also after an aborted one."""
        self.pipeline.end()
        if self._counted:
            self.pipeline.step.sink.forget()

    def _begin(self, phase: Phase, share: Share) -> Batch:
        batch = Batch(phase, (share,))
        self._counted = True
        self.pipeline.begin(batch)
        return batch
