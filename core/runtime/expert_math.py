"""The arithmetic of experts, read from slots, in the order of transformers' grouped_mm: bit-identical to it.

On a GPU several experts are computed in one launch where kernels exist (core.memory.codec.kernels): these sum in fp32
and round once, so they are as close to the exact product as transformers' results, but not bit-identical to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from core.hf.expert_attributes import ASCENDING, IDLE
from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.kernels import SlotKernels
from core.memory.codec.plain import Plain
from core.memory.codec.segments import Segments
from core.runtime.grouped import FEW, GroupedMath
from core.runtime.product import Product, by_expert, limited, resident_first
from core.runtime.row_places import BLOCK, Places, depends_on_position, gated

ROWS = 256  # of a prompt computed at once on a CPU, of several plain experts: fewer calls. Codes gain nothing by it
ROOM = 2048  # rows of a prompt that a GPU has room for, of any number of experts: a launch takes longer than an expert
AT_ONCE = (1 << 19, 1 << 22)  # numbers that are weighted and summed at once, on a CPU and on a GPU

Tap = Callable[[torch.Tensor], None]


class ExpertMath:
    """The feed-forward of one MoE layer's experts: up (gate and up together), activation, down.

    Source: transformers.integrations.moe.grouped_mm_experts_forward, whose results it reproduces. Its products: `token`
    of one row; `prompt` of many; `blocks` of one row through parts of experts (None for whole ones, and without kernels
    for a GPU: there experts in blocks are joined first).
    """

    token: Product
    prompt: Product
    blocks: Product | None

    def __init__(
        self,
        experts: Any,
        codec: Codec,
        kernels: SlotKernels | None = None,
        joined: tuple[ExpertMath, ExpertScratch] | None = None,
        *,
        placed: bool = False,
    ) -> None:
        """`experts` is the model's own experts module: its flags and its activation are used, not its weights.
        `kernels` are those for the codec's slots, if any exist; `joined`: what computes experts in blocks as whole
        ones; `placed`: the activation needs row positions, see `needs_places`."""
        self.codec, self._joined, self._placed = codec, joined, placed
        self.up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self.has_bias = bool(experts.has_bias)
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn
        self._norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        self._ascending = bool(getattr(experts, ASCENDING, False))
        self.has_idle = bool(getattr(experts, IDLE, False))  # experts of weight 0 need not be computed
        self.grouped = (
            GroupedMath(kernels, codec, self.up_name, self.has_bias, self._gate) if kernels is not None else None
        )
        self.choose()

    @property
    def inputs(self) -> int:
        """Width of what experts read: the model's, unless it narrows its states for them."""
        return self.codec.out_in(self.up_name)[1]

    def needs_places(self) -> bool:
        """Whether the activation's bits depend on row positions while the products around it are exact. Found by
        trials."""
        width, inner = self.codec.out_in(self.up_name)[0], self.codec.out_in("down_proj")[1]
        exact = isinstance(self.codec, Plain) and self.codec.device.type == "cpu"
        return exact and inner % BLOCK > 0 and depends_on_position(self._gate, width, self.codec.dtype)

    def choose(self, *, kernels: bool = True) -> None:
        """Set the products. Without `kernels` those of a GPU are not used any more."""
        if not kernels:
            self.grouped = None
        codec, placed = self.codec, self._placed
        first = partial(resident_first, late_together=codec.device.type == "cuda")
        self.blocks = None
        if self._joined is not None:
            whole, scratch = self._joined
            self.token, self.prompt = scratch.join(whole.token), scratch.join(whole.prompt)
            if self.grouped is not None:
                self.blocks = Product(self._block_parts, first, adds=True)
        elif self.grouped is not None:
            self.token = Product(self.grouped.few, first)
            self.prompt = Product(self._by_kernels, partial(limited, few=FEW, room=ROOM, together=ROOM))
        else:
            several = isinstance(codec, Plain) and not placed
            limits = partial(limited, most=ROWS, late=1) if several else partial(limited, together=1, late=1)
            self.token, self.prompt = Product(self.one_by_one, first, placed), Product(self.one_by_one, limits, placed)

    # ------------------------------------------------------------------ parts of an expert

    def up(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, 2I], before the activation."""
        parts = slot.parts(self.codec)
        y = self.codec.linear(parts, self.up_name, x)
        return y.add_(parts.plain[self.up_name + "_bias"]) if self.has_bias else y

    def activate(self, y: torch.Tensor, places: Places | None = None) -> torch.Tensor:
        """[n, 2I] -> [n, I], the model's own activation; `places` matter only where it needs row positions."""
        activated: torch.Tensor = self._gate(y) if places is None else gated(self._gate, y, places)
        return activated

    def down(self, slot: Slot, a: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]."""
        parts = slot.parts(self.codec)
        y = self.codec.linear(parts, "down_proj", a)
        return y.add_(parts.plain["down_proj_bias"]) if self.has_bias else y

    # ------------------------------------------------------------------ products, as core.runtime.product.Multiply

    def one_by_one(
        self, slots: Sequence[Slot], x: torch.Tensor, counts: Sequence[int] | None = None, places: Places | None = None
    ) -> torch.Tensor:
        """One product per expert."""
        if len(slots) == 1:
            return self.down(slots[0], self.activate(self.up(slots[0], x), places))
        rows = x.split(counts) if counts is not None else [x] * len(slots)
        acts = self.activate(torch.cat([self.up(*one) for one in zip(slots, rows, strict=True)]), places)
        return torch.cat([self.down(*one) for one in zip(slots, acts.split(counts or 1), strict=True)])

    def _by_kernels(
        self, slots: Sequence[Slot], x: torch.Tensor, counts: Sequence[int] | None = None, places: Places | None = None
    ) -> torch.Tensor:
        """The rows of a prompt, on a GPU: of experts that all have at most FEW rows each, or all have more."""
        assert self.grouped is not None and counts is not None
        if max(counts) <= FEW:
            return self.grouped.few([slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)], x)
        if self.grouped.is_plain:
            return self.one_by_one(slots, x, counts, places)
        return self.grouped.many(slots, counts, x)

    def _block_parts(
        self, slots: Sequence[Slot], x: torch.Tensor, counts: Sequence[int] | None = None, places: Places | None = None
    ) -> torch.Tensor:
        """One row [1, H] through blocks of experts -> [blocks, H] in fp32, to be added by expert, in order, and rounded
        once: a block's output does not depend on the others, so that no bit of the sum depends on how many of them were
        resident (MoEpic section 3.1)."""
        assert self.grouped is not None
        return self.grouped.few(slots, x).float()

    # ------------------------------------------------------------------ the weighted sum

    @property
    def finds(self) -> bool:
        """Whether `by_ids` can be called: there are kernels."""
        return self.grouped is not None

    def by_ids(
        self, table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One state [1, H] through the experts that `ids` [k] says on the device, each read at its address in `table`
        [experts], by their weights [1, k] -> [1, H]. The host waits for nothing."""
        assert self.grouped is not None
        return self.combine(self.grouped.by_ids(table, ids, hidden), weights, hidden.dtype)

    def in_slots(self, slots: Sequence[Slot], hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same of experts in slots, in their order: with the same bits."""
        assert self.grouped is not None
        return self.combine(self.grouped.few(slots, hidden), weights, hidden.dtype)

    def combine(
        self, out: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype, tap: Tap | None = None
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
        if self._ascending:
            total, *others = weighted.to(dtype).view(tokens, k, -1).unbind(1)
            for other in others:
                total = total + other
            return total
        return weighted.view(tokens, k, -1).sum(dim=1).to(dtype)


class ExpertScratch:
    """Memory of one whole expert on the device, which blocks are copied into. Shared by layers that are alike."""

    def __init__(self, whole: Codec, blocks: Segments) -> None:
        """`blocks`: how slots of `whole` are cut."""
        raw = torch.empty(whole.slot_bytes, dtype=torch.uint8, device=whole.device)
        self._slot, self._blocks = Slot(0, raw, raw.data_ptr()), blocks
        self._places = [blocks.places(number, raw) for number in range(len(blocks.segments))]

    def join(self, product: Product) -> Product:
        """A product of experts in blocks that computes each as a whole, with the bits of one block: for prompts, where
        copying an expert costs little beside computing many rows with it, and for tokens of a cache that keeps whole
        experts anyway."""

        def multiply(
            slots: Sequence[Slot], x: torch.Tensor, counts: Sequence[int] | None = None, places: Places | None = None
        ) -> torch.Tensor:
            return product.multiply([self._whole(slots)], x, counts, places)

        return Product(multiply, by_expert, product.placed)

    def _whole(self, blocks: Sequence[Slot]) -> Slot:
        """The expert of which these are all the blocks, until the next call."""
        for number, (places, block) in enumerate(zip(self._places, blocks, strict=True)):
            for place, part in zip(places, self._blocks.views(number, block.raw), strict=True):
                place.copy_(part)
        return self._slot
