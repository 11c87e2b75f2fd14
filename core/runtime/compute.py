"""The arithmetic of experts, read from slots, in the order of transformers' grouped_mm: bit-identical to it.

On a GPU several experts are computed in one launch where kernels exist (core.memory.codec.kernels): these sum in fp32
and round once, so they are as close to the exact product as transformers' results, but not bit-identical to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from core.cache.lease import LeasedSegment
from core.hf.adapters.expert_attributes import ASCENDING, IDLE
from core.memory.arena import Slot
from core.memory.codec import Codec, SlotParts
from core.memory.codec.direct import FusedCodec, PlainBlocks, PlainRows, row_products
from core.memory.codec.kernels import SlotKernels
from core.memory.codec.plain import Plain
from core.runtime.grouped import GroupedMath, together
from core.runtime.joined import JoinedMath
from core.runtime.row_places import BLOCK, Places, consecutive, depends, scattered

ROWS = 256  # of a prompt computed at once on a CPU, of several plain experts: fewer calls. Codes gain nothing by it
AT_ONCE = (1 << 19, 1 << 22)  # numbers that are weighted and summed at once, on a CPU and on a GPU


class ExpertMath:
    """The feed-forward of one MoE layer's experts: up (gate and up together), activation, down.

    Source: transformers.integrations.moe.grouped_mm_experts_forward, whose results it reproduces. `stack` computes
    several experts of one token in one product: directly from their slots where the codec can, else over copies of
    their weights; see core.runtime.stacking.
    """

    def __init__(self, experts: Any, codec: Codec, kernels: SlotKernels | None = None) -> None:
        """`experts` is the model's own experts module: its flags and its activation are used, not its weights.
        `kernels` are those for the codec's slots, if any exist."""
        self.codec = codec
        self.up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self.has_bias = bool(experts.has_bias)
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn
        self._norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        self._one_by_one = bool(getattr(experts, ASCENDING, False))
        self.has_idle = bool(getattr(experts, IDLE, False))  # experts of weight 0 need not be computed
        self.stack = isinstance(codec, FusedCodec)
        self.placed = False  # whether the activation needs row positions: see `needs_places`
        self.joined: JoinedMath | None = None  # of experts in blocks
        self.grouped = GroupedMath(kernels, self.up_name, self.has_bias, self._gate) if kernels is not None else None

    @property
    def inputs(self) -> int:
        """Width of what experts read: the model's, unless it narrows its states for them."""
        return self.codec.out_in(self.up_name)[1]

    def needs_places(self) -> bool:
        """Whether the activation's bits depend on row positions while the products around it are exact, or are to be
        the same whichever blocks are computed together."""
        width, inner = self.codec.out_in(self.up_name)[0], self.codec.out_in("down_proj")[1]
        exact = (isinstance(self.codec, Plain) or self.codec.blocks > 1) and self.codec.device.type == "cpu"
        return exact and inner % BLOCK > 0 and depends(self._gate, width, self.codec.dtype)

    def up(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, 2I], before the activation."""
        y = self.codec.linear(slot.parts, self.up_name, x)
        return y.add_(slot.parts.plain[self.up_name + "_bias"]) if self.has_bias else y

    def activate(self, y: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        """[n, 2I] -> [n, I], the model's own activation; `places` matters only where `placed`."""
        activated: torch.Tensor = self._gate(y) if places is None else scattered(self._gate, y, places)
        return activated

    def down(self, slot: Slot, a: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]."""
        y = self.codec.linear(slot.parts, "down_proj", a)
        return y.add_(slot.parts.plain["down_proj_bias"]) if self.has_bias else y

    def token(self, slots: Sequence[Slot], x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        """One token's state [1, H] through several experts -> [n, H], in the order of `slots`, or through the one that
        all these blocks are of."""
        if self.joined is not None:
            return self.joined.token(slots, x, places)
        if self.grouped is not None:
            return self.grouped.few(slots, x)
        return self.stacked(slots, x, places) if self.stack and len(slots) > 1 else self.one_by_one(slots, x, places)

    def one_by_one(self, slots: Sequence[Slot], x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        """One product per expert."""
        acts = self.activate(torch.cat([self.up(slot, x) for slot in slots]), places)
        return torch.cat([self.down(slot, a) for slot, a in zip(slots, acts.split(1), strict=True)])

    def batches(
        self, segments: Sequence[LeasedSegment], rows: Mapping[int, slice], tokens: int
    ) -> Iterable[list[LeasedSegment]]:
        """Group the segments of a prompt of `tokens` tokens into the batches that `many` takes, resident ones first;
        `rows` by expert. Blocks of an expert are computed together."""
        if self.joined is not None:
            return by_expert(segments)
        segments = sorted(segments, key=lambda one: one.ticket is not None)
        if self.grouped is not None:
            return together(segments, rows, tokens)
        if self.placed or not isinstance(self.codec, Plain):
            return ([one] for one in segments)
        return together(segments, rows, min(tokens, ROWS), late=1)

    def blocks(self, slots: Sequence[Slot], x: torch.Tensor) -> torch.Tensor:
        """One token's state [1, H] through blocks of experts -> [blocks, H] in fp32, to be summed by expert. A block's
        output does not depend on the others."""
        if self.grouped is not None:
            return self.grouped.few(slots, x).float()
        codec, parts = self.codec, [slot.parts for slot in slots]
        direct = codec if isinstance(codec, FusedCodec | PlainBlocks) else None
        if direct is not None:
            ups = self._biased(direct.stacked(parts, self.up_name, x), parts, self.up_name)
        else:
            ups = torch.cat([self.up(slot, x) for slot in slots])
        acts = torch.cat([self.activate(y) for y in ups.split(1)]) if self.placed else self.activate(ups)
        if direct is not None:
            return self._biased(direct.stacked(parts, "down_proj", acts, rounded=False), parts, "down_proj")
        return torch.cat([self.down(slot, a) for slot, a in zip(slots, acts.split(1), strict=True)]).float()

    def many(self, slots: Sequence[Slot], rows: Sequence[slice], x: torch.Tensor, total: int) -> torch.Tensor:
        """States x [their rows, H] through the experts in `slots`, one expert's after the other's, or through the one
        that all these blocks are of -> the same shape. `rows` = where these rows are among the `total` of the layer,
        when sorted by expert."""
        if self.joined is not None:
            return self.joined.many(slots, rows[0], x, total)
        counts = [at.stop - at.start for at in rows]
        if self.grouped is not None and self.grouped.takes(sum(counts)):
            return self.grouped.many(slots, counts, x)
        if len(slots) == 1:
            return self._many_rows(slots[0], rows[0], x, total)
        acts = self.activate(torch.cat([self.up(*one) for one in zip(slots, x.split(counts), strict=True)]))
        return torch.cat([self.down(*one) for one in zip(slots, acts.split(counts), strict=True)])

    def _many_rows(self, slot: Slot, at: slice, x: torch.Tensor, total: int) -> torch.Tensor:
        y = self.up(slot, x)
        return self.down(slot, consecutive(self._gate, y, at.start, total) if self.placed else self.activate(y))

    @functools.cached_property
    def row_products(self) -> FusedCodec | PlainRows | None:
        """What computes `pairs`; None where nothing does: on a GPU, of blocks, and without kernels for this CPU."""
        return None if self.grouped is not None or self.codec.blocks > 1 else row_products(self.codec)

    @property
    def rows_at_once(self) -> int:
        """The most rows of one expert that `pairs` multiplies together."""
        products = self.row_products
        return products.at_once if products is not None else 1

    def pairs(self, runs: Sequence[tuple[int, Sequence[Slot]]], x: torch.Tensor) -> torch.Tensor:
        """States x [n, H], so many consecutive ones through the expert in each slot of a run -> [n, H]. Every product's
        sum is fp32 and rounded once, so that a row does not depend on the others."""
        products, parts = self.row_products, [(count, [slot.parts for slot in slots]) for count, slots in runs]
        assert products is not None
        each = [one for count, some in parts for one in some for _ in range(count)] if self.has_bias else []
        ups = self._biased(products.several(parts, self.up_name, x), each, self.up_name)
        return self._biased(products.several(parts, "down_proj", self.activate(ups)), each, "down_proj")

    @property
    def can_copy(self) -> bool:
        """Whether weights can be copied together: stored plain (not quantised) and without biases."""
        return isinstance(self.codec, Plain) and not self.has_bias

    def stacked(self, slots: Sequence[Slot], x: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        """All experts in one product. Only where `can_copy`, or with a FusedCodec, which multiplies directly from
        slots."""
        assert isinstance(self.codec, Plain | FusedCodec)
        parts = [slot.parts for slot in slots]
        acts = self.activate(self._biased(self.codec.stacked(parts, self.up_name, x), parts, self.up_name), places)
        return self._biased(self.codec.stacked(parts, "down_proj", acts), parts, "down_proj")

    def _biased(self, y: torch.Tensor, parts: Sequence[SlotParts], part: str) -> torch.Tensor:
        return y.add_(torch.stack([one.plain[part + "_bias"] for one in parts])) if self.has_bias else y

    def combine(
        self,
        out: torch.Tensor,
        weights: torch.Tensor,
        dtype: torch.dtype,
        tap: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Outputs of all pairs [T * k, H] and router weights [T, k] -> [T, H], summed in top-k order; rounds after each
        addition where the model's own code does. `tap` gets the outputs before they are weighted."""
        norm = self._norm
        if tap is not None:
            out, norm = out if norm is None else norm(out), None
            tap(out)
        tokens, k = weights.shape
        step = max(1, AT_ONCE[out.device.type == "cuda"] // (k * out.shape[1]))
        if tokens <= step:
            return self._summed(out, weights, dtype, norm)
        total = torch.empty(tokens, out.shape[1], dtype=dtype, device=out.device)
        for at in range(0, tokens, step):  # a part at a time stays in the processor's cache, and needs less memory
            some = weights[at : at + step]
            total[at : at + step] = self._summed(out[at * k : (at + len(some)) * k], some, dtype, norm)
        return total

    def _summed(
        self, out: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype, norm: Callable[..., Any] | None
    ) -> torch.Tensor:
        tokens, k = weights.shape
        weighted = (out if norm is None else norm(out)) * weights.reshape(-1, 1)
        if self._one_by_one:
            total, *others = weighted.to(dtype).view(tokens, k, -1).unbind(1)
            for other in others:
                total = total + other
            return total
        return weighted.view(tokens, k, -1).sum(dim=1).to(dtype)


def by_expert(segments: Iterable[LeasedSegment]) -> list[list[LeasedSegment]]:
    """The segments of each expert, experts that wait for no copy first."""
    of: dict[int, list[LeasedSegment]] = {}
    for one in segments:
        of.setdefault(one.expert, []).append(one)
    return sorted(of.values(), key=lambda some: any(one.ticket is not None for one in some))
