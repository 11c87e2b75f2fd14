"""Unquantised weights. Blobs keep their own number type; slots have the compute dtype."""

from collections.abc import Mapping

import torch

from core.memory.codec.base import Base, Entries, SlotParts
from core.memory.codec.coded import QuantizedTensor


class Plain(Base):
    """`linear` runs the same matrix product that transformers' grouped_mm runs per expert on a CPU: bit-identical."""

    def fields(self) -> tuple[Entries, Entries]:
        types = {n: (self.numbers_in(n) if s.is_weight else self.numbers).weight for n, s in self.specs.items()}
        blob: Entries = {name: (types[name], spec.shape) for name, spec in self.specs.items()}
        return blob, {name: (self.dtype, shape) for name, (_, shape) in blob.items()}

    def encode_whole(self, parts: Mapping[str, torch.Tensor | QuantizedTensor]) -> torch.Tensor:
        blob, views = self.begin_blob(parts)
        for name in self.weights:
            given = parts[name]
            if isinstance(given, QuantizedTensor):
                given = self.rows(given).t() if self.is_transposed else self.rows(given)
            views[name].copy_(given)
        return blob

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        stored = {n: tensors[n] for n in self.weights}
        weights = {n: (w if self.is_transposed else w.t(), w) for n, w in stored.items()}  # [in, out], and as stored
        return SlotParts(weights, {n: tensors[n] for n in self.biases}, slot.data_ptr())

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, parts.weights[part][0])

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        weight = parts.weights[part][0]
        return weight if self.is_transposed else weight.t()
