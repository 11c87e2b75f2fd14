"""Weights as they are: cast to the compute dtype when the checkpoint has another, and otherwise byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from core.memory.codec.base import Base, Layout, PartSpec, SlotParts


class Plain(Base):
    """`linear` runs the very matrix product that transformers' grouped_mm runs per expert on a CPU: bit-identical."""

    name = "checkpoint"

    def __init__(self, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device,
                 is_transposed: bool) -> None:
        super().__init__(specs, dtype, device, is_transposed)
        self.blob_layout = self.slot_layout = Layout.of({n: (dtype, s.shape) for n, s in specs.items()})

    def encode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        blob = torch.zeros(self.blob_bytes, dtype=torch.uint8)
        for name, view in self.blob_layout.views(blob).items():
            view.copy_(parts[name])
        return blob

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        stored = {n: tensors[n] for n in self.weights}
        weights = {n: (w if self.is_transposed else w.t(), w) for n, w in stored.items()}  # [in, out], and as stored
        return SlotParts(weights, {n: tensors[n] for n in self.biases})

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, parts.weights[part][0])

    def stacked(self, many: Sequence[SlotParts], part: str, x: torch.Tensor) -> torch.Tensor:
        """Row i of x [n, in] times the part's matrix of many[i] -> [n, out], as one product over copies."""
        matrices = torch.stack([parts.weights[part][1] for parts in many])
        return torch.bmm(x.unsqueeze(1), matrices if self.is_transposed else matrices.transpose(1, 2)).squeeze(1)

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        weight = parts.weights[part][0]
        return weight if self.is_transposed else weight.t()
