"""Several experts' arithmetic in a few launches on a GPU: the kernels' products around the model's own activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from core.cache.lease import LeasedExpert
from core.memory.arena import Slot
from core.memory.codec.kernels import LANES_MOST, SlotKernels

FEW = 64  # rows that are computed straight out of slots; each reads its expert's weights anew
TOGETHER = LANES_MOST  # experts of a prompt that are computed together
LATE = 4  # of those still on their way: what has landed is computed while the next are copied
DOWN = "down_proj"


class GroupedMath:
    """What ExpertMath does an expert at a time, for several. Biases and activations are the model's own."""

    def __init__(
        self, kernels: SlotKernels, up: str, has_bias: bool, gate: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """`up` = the name of the first matrix, `gate` = [n, 2I] -> [n, I]."""
        self._kernels, self._up, self._bias, self._gate = kernels, up, has_bias, gate

    def few(self, slots: Sequence[Slot], x: torch.Tensor) -> torch.Tensor:
        """A state for each slot [n, H], or one for all [1, H] -> [n, H]. Two launches, or two for every 16 slots."""
        raw = [slot.raw for slot in slots]
        return self._kernels.multiply(DOWN, raw, self._gate(self._kernels.multiply(self._up, raw, x)))

    def takes(self, rows: int) -> bool:
        """Whether `many` serves that many rows: plain weights of many rows are best multiplied where they are."""
        return rows <= FEW or not self._kernels.is_plain

    def many(self, slots: Sequence[Slot], counts: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """counts[i] states through the expert in slots[i]: x [all, H], one expert's after another's -> [all, H]."""
        if x.shape[0] <= FEW:
            return self.few([slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)], x)
        return self._product(DOWN, slots, counts, self._gate(self._product(self._up, slots, counts, x)))

    def _product(self, part: str, slots: Sequence[Slot], counts: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """By dequantised weights, some experts at a time."""
        out, start = x.new_empty(x.shape[0], self._kernels.outputs(part)), 0
        for first, weights in self._kernels.widened(part, [slot.raw for slot in slots]):
            some = counts[first : first + len(weights)]
            end = start + sum(some)
            products(x[start:end], weights, some, out[start:end])
            start = end
        if self._bias:
            for slot, rows in zip(slots, out.split(list(counts)), strict=True):
                rows.add_(slot.parts.plain[part + "_bias"])
        return out


def products(x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
    """counts[i] rows of x [all, in] times weights[i] [out, in], into out [all, out]."""
    if has_grouped_mm(weights):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.pin_memory().to(x.device, non_blocking=True)
        out.copy_(torch.nn.functional.grouped_mm(x.contiguous(), weights.transpose(-2, -1), offs=ends))
        return
    for i, (rows, into) in enumerate(zip(x.split(list(counts)), out.split(list(counts)), strict=True)):
        torch.mm(rows, weights[i].t(), out=into)


def has_grouped_mm(weights: torch.Tensor) -> bool:
    """Whether torch has a grouped kernel for weights [experts, out, in]: bf16 on Hopper and data-centre Blackwell.

    Elsewhere its `grouped_mm` is a loop over the groups that waits for their sizes first.
    """
    if weights.device.type != "cuda" or weights.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    major, _ = torch.cuda.get_device_capability(weights.device)
    return major in (9, 10) and weights.shape[1] % 8 == weights.shape[2] % 8 == 0


def together(held: Sequence[LeasedExpert], rows: Mapping[int, slice], tokens: int) -> Iterator[list[LeasedExpert]]:
    """Cut leased experts, in their order, into those computed together: no more rows than one expert can have
    (`tokens`), which is what the workspace is counted for; `rows` by expert."""
    some: list[LeasedExpert] = []
    size = 0
    for one in held:
        count = rows[one.expert].stop - rows[one.expert].start
        if some and (size + count > tokens or len(some) >= (LATE if one.ticket is not None else TOGETHER)):
            yield some
            some, size = [], 0
        some.append(one)
        size += count
    if some:
        yield some
