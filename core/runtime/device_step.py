"""The MoE layers of a decoded token without the host: the GPU finds the experts that its router chose by itself.

Kernels take the router's ids and a table of addresses, which are on the device; an expert without a slot is read over
the link, out of pinned host memory, or computed there by threads of the host (core.runtime.host_join). The host
launches all layers without waiting for any, and gets all of the token's ids in one piece at its end. Then, or once the
next token is launched, it counts hits and misses, and admits experts by the same policies to the same cache
(core.cache.address_table). Every product,
activation and sum has the bits of `core.runtime.moe_step` on this GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch

from core.cache.address_table import AddressTable
from core.cache.expert_cache import ExpertCache
from core.errors import HostError
from core.runtime.batch import Batch, Share
from core.runtime.expert_math import ExpertMath
from core.runtime.host_join import HostJoin
from core.runtime.program.gpu.rows import GpuMath
from core.runtime.step_sink import StepSink


class Ahead(NamedTuple):
    """A pass over a share's one token, decided about before it was asked for: its KV had such a length. It was launched
    by `step`, or is left to the host."""

    share: Share
    length: int
    step: DeviceStep | None = None
    logits: torch.Tensor | None = None  # [1, V]

    def is_of(self, batch: Batch) -> bool:
        """Whether it computes what follows now."""
        own, share = self.share, batch.shares[0]
        kv = share.kv if len(batch.shares) == 1 else None
        return kv is not None and kv is own.kv and kv.length == self.length and [*share.tokens] == [*own.tokens]


class DeviceStep:
    """Of one model and one cache, in the place of a MoEStep for passes over one token."""

    def __init__(
        self,
        math: Sequence[ExpertMath],
        expert_cache: ExpertCache,
        sink: StepSink,
        home: Sequence[int],
        top_k: int,
        device: torch.device,
        join: HostJoin | None = None,
    ) -> None:
        """`math` computes by kernels; `home` = where they read each expert in host memory, by eid; none where the
        host computes it there: `join`."""
        self._math, self._expert_cache, self._sink, self.join = math, expert_cache, sink, join
        home = home or [0] * (expert_cache.layers * expert_cache.experts)
        self.table = AddressTable(expert_cache, home, device, hosted=join is not None)
        with torch.inference_mode(False):
            self._ids = torch.zeros(len(math), top_k, dtype=torch.int64, device=device)  # of the running token
            self._ids_on_host = torch.zeros(len(math), top_k, dtype=torch.int64).pin_memory()  # those of the last one
        self._chosen: list[torch.Tensor] = []  # of the layers so far
        self._attending, self._waited_s, self._slotted = ExitStack(), 0.0, b""  # of the running token
        self._due: tuple[list[list[int]], bytes] | None = None  # of the last one: its ids, and who was in a slot

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Launch what computes one token's state [1, H] with its experts ids [1, k] -> [1, H]."""
        math, own = self._math[layer], ids[0]
        del self._chosen[layer:]  # of a pass that broke off
        self._chosen.append(own)
        if len(self._chosen) == len(self._math):
            torch.stack(self._chosen, out=self._ids)  # one launch a token
            self._chosen = []
        if self.join is not None:
            return self.joined(self.join, layer, self.table.addresses[layer], own, hidden, weights)
        return math.by_ids(self.table.addresses[layer], own, hidden, weights)

    def joined(
        self,
        join: HostJoin,
        layer: int,
        table: torch.Tensor,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Launch the same with a table [experts] of the layer in which those that the host computes have address 0."""
        math = self._math[layer]
        assert isinstance(math, GpuMath)
        return math.with_host(join.mail, table, ids, layer * self._expert_cache.experts, hidden, weights)

    def serves(self, batch: Batch) -> bool:
        """Whether a pass can be computed like this, now: one token, and no prefetch whose layer is still to come."""
        one_token = batch.phase == "decode" and batch.size == 1
        return one_token and not self._expert_cache.has_pending_prefetches

    @contextmanager
    def token(self) -> Iterator[None]:
        """Around launching a token's pass. At its end the host waits for the token, the only time; what it was computed
        with is still to be settled."""
        with self.launching():
            yield
        self.finish()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """The same without the wait: `finish`, or `drop`, is to follow."""
        self._waited_s, self._slotted = self.table.sync_table(), self.table.slotted()
        if self.join is not None:
            self._attending.enter_context(self.join.attended(lambda took_s: self._sink.hosted(took_s, 0.0)))
        try:
            yield
            self._ids_on_host.copy_(self._ids, non_blocking=True)
        except BaseException:
            self.drop()
            raise

    def finish(self) -> None:
        """Wait for the token that was launched."""
        try:
            self._wait()
        except BaseException:
            self.drop()
            raise
        self._attending.close()
        self._sink.waited(self._waited_s, late=False)
        self._due = self._ids_on_host.tolist(), self._slotted

    def drop(self) -> None:
        """Wait for the token that was launched, of which nothing is to be known: its layers may read any slot, and the
        table. What comes of it is of no interest, errors neither."""
        with suppress(RuntimeError):  # of a device that is lost
            self._wait()
        with suppress(HostError):
            self._attending.close()

    def broke_off(self) -> None:
        """Keep nothing of a pass that ended before its last layer."""
        self._chosen = []

    def forget(self) -> None:
        """What the last token was computed with counts no more: its pass broke off."""
        self._due = None

    def settle(self, *, launched: bool) -> None:
        """Request and count what the last token was computed with, if that was not done. `launched`: the next one is,
        and reads slots."""
        if self._due is None:
            return
        (routed, slotted), self._due = self._due, None
        fence = None
        if launched:
            fence = torch.cuda.Event()
            fence.record()
        found = self.table.request(routed, slotted, fence)
        for layer, (chosen, requests) in enumerate(zip(routed, found, strict=True)):
            self._sink.layer(layer, [chosen], requests)

    def close(self) -> None:
        """Follow the cache no longer."""
        self.table.close()
        if self.join is not None:
            self.join.close()

    def _wait(self) -> None:
        torch.cuda.current_stream(self._ids.device).synchronize()
