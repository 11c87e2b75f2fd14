"""Weights as they are: cast to the compute dtype when the checkpoint has another, and otherwise byte for byte."""

from __future__ import annotations

from collections.abc import Mapping

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
        weights = {n: (tensors[n] if self.is_transposed else tensors[n].t(),) for n in self.weights}  # [in, out]
        return SlotParts(weights, {n: tensors[n] for n in self.biases})

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, parts.weights[part][0])

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        weight = parts.weights[part][0]
        return weight if self.is_transposed else weight.t()
