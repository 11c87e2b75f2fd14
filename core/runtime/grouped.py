"""Computes several experts in a few GPU launches: kernel products around the model's own activation."""

from collections.abc import Callable, Sequence

import torch

from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.kernels import LANES_MOST, SlotKernels
from core.memory.to_device import to_device
from core.runtime.row_places import Places

# Rows of an expert in a pass up to which each row reads the expert's weights in its slot; for more they are dequantised
# once, or multiplied in place where they are plain. The two sum in different orders, so this number is part of the
# function that is computed: it is not measured, and counts an expert's own rows, never what lies in a batch with it,
# which depends on which experts are resident. From about 8 rows on a codec of 4 bits a weight reads more bytes by row
# than by writing and reading 16-bit weights.
FEW = 8
DOWN = "down_proj"


class GroupedMath:
    """Does for several experts at once what ExpertMath does for one. Biases and activation are the model's own."""

    def __init__(
        self,
        kernels: SlotKernels,
        codec: Codec,
        up: str,
        has_bias: bool,
        gate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`kernels` are those for slots of `codec`; `up` = name of the first matrix, `gate` = the activation [n, 2I] ->
        [n, I]."""
        self._kernels, self._codec, self._up, self._bias, self._gate = kernels, codec, up, has_bias, gate

    def few(
        self, slots: Sequence[Slot], x: torch.Tensor, counts: Sequence[int] | None = None, places: Places | None = None
    ) -> torch.Tensor:
        """One state per slot [n, H], or one for all [1, H] -> [n, H]. Two launches."""
        raw = [slot.raw for slot in slots]
        if len(raw) > LANES_MOST:
            table = to_device([one.data_ptr() for one in raw], x.device, torch.int64)
            return self.by_ids(table, torch.arange(len(raw), device=x.device), x)
        return self._kernels.multiply(DOWN, raw, self._gate(self._kernels.multiply(self._up, raw, x)))

    def by_ids(self, table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """One state [1, H], or one for each [k, H], through the experts that `ids` [k] says on the device, each read at
        its address in `table` [experts] -> [k, H], with the bits of `few`. Two launches around the activation's; the
        host waits for nothing."""
        a = self._gate(self._kernels.multiply_by_ids(self._up, table, ids, x))
        return self._kernels.multiply_by_ids(DOWN, table, ids, a)

    @property
    def is_plain(self) -> bool:
        """Whether experts of more than FEW rows are multiplied in place: `many` is for coded weights."""
        return self._kernels.is_plain

    def many(self, slots: Sequence[Slot], counts: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """counts[i] states through the expert in slots[i]; x [all, H] is ordered by expert -> [all, H]."""
        return self._product(DOWN, slots, counts, self._gate(self._product(self._up, slots, counts, x)))

    def _product(self, part: str, slots: Sequence[Slot], counts: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """Multiplies by dequantised weights, some experts at a time."""
        out, start = x.new_empty(x.shape[0], self._kernels.outputs(part)), 0
        for first, weights in self._kernels.dequantized(part, [slot.raw for slot in slots]):
            some = counts[first : first + len(weights)]
            end = start + sum(some)
            products(x[start:end], weights, some, out[start:end])
            start = end
        if self._bias:
            for slot, rows in zip(slots, out.split(list(counts)), strict=True):
                rows.add_(slot.parts(self._codec).plain[part + "_bias"])
        return out


def products(x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
    """counts[i] rows of x [all, in] times the transpose of weights[i] [out, in], written to out [all, out]."""
    if has_grouped_mm(weights):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.pin_memory().to(x.device, non_blocking=True)
        out.copy_(torch.nn.functional.grouped_mm(x.contiguous(), weights.transpose(-2, -1), offs=ends))
        return
    for i, (rows, into) in enumerate(zip(x.split(list(counts)), out.split(list(counts)), strict=True)):
        torch.mm(rows, weights[i].t(), out=into)


def has_grouped_mm(weights: torch.Tensor) -> bool:
    """Whether torch has a grouped kernel for weights [experts, out, in]: bf16 on Hopper and data-centre Blackwell.

    On other devices its `grouped_mm` loops over the groups and first waits for their sizes.
    """
    if weights.device.type != "cuda" or weights.dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    major, _ = torch.cuda.get_device_capability(weights.device)
    return major in (9, 10) and weights.shape[1] % 8 == weights.shape[2] % 8 == 0
