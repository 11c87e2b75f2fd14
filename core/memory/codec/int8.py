"""8 bits a weight, one scale for each output row, on a CPU in bf16: torch's packed int8 product for a few rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.memory.codec.base import Entries, PartSpec, SlotParts
from core.memory.codec.grouped import Grouped

PACKED_ROWS = 8  # up to this many rows the packed product beats casting the weights first
# measured: python -m core.memory.codec.measure


class Int8Rows(Grouped):
    """Slots hold the blob's codes, and the scales in the compute dtype as the product wants them."""

    direct = True

    def slot_entries(self, blob: Entries) -> Entries:
        return {n: (self.dtype if n.endswith(".scale") else dtype, shape)
                for n, (dtype, shape) in super().slot_entries(blob).items()}

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        q, scale = parts.weights[part]
        if x.shape[0] <= PACKED_ROWS:
            packed: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, q, scale)
            return packed
        return self.unpacked(parts, part, x)

    def unpacked(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        q, scale = parts.weights[part]
        return torch.mm(x, q.to(self.dtype).t()).mul_(scale)


def supported(specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device, is_transposed: bool) -> bool:
    """Whether torch's packed int8 product serves these matrices here; it reads past rows that 16 does not divide."""
    columns = [s.shape[0 if is_transposed else 1] for s in specs.values() if s.is_weight]
    return device.type == "cpu" and dtype == torch.bfloat16 and all(column % 16 == 0 for column in columns)
