"""8 bits a weight: one scale for each output row, symmetric. Half the bytes of bf16, errors of about one percent.

A matrix is kept as [out, in] however the model stores it, so a row's scale is an output's scale in every model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.memory.codec.base import Base, Layout, PartSpec, SlotParts

PACKED_ROWS = 8  # bf16 on a CPU: up to this many rows the packed product beats casting the weights first
# measured: python -m core.memory.codec.measure


class Int8(Base):
    """The scale is rounded to the compute dtype before the weights are, so storing it costs no accuracy."""

    name = "int8"

    def __init__(self, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device,
                 is_transposed: bool) -> None:
        super().__init__(specs, dtype, device, is_transposed)
        fields = self.bias_fields()
        for part in self.weights:
            out, columns = self.out_in(part)
            fields |= {f"{part}.q": (torch.int8, (out, columns)), f"{part}.scale": (dtype, (out,))}
        self.blob_layout = self.slot_layout = Layout.of(fields)
        self._packed_rows = PACKED_ROWS if device.type == "cpu" and dtype == torch.bfloat16 else 0

    def encode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        blob, views = self.begin_blob(parts)
        for name in self.weights:
            weight = self.rows(parts[name])
            scale = (weight.abs().amax(1) / 127).clamp_(min=1e-7).to(self.dtype)
            views[f"{name}.q"].copy_((weight / scale.float()[:, None]).round_().clamp_(-127, 127))
            views[f"{name}.scale"].copy_(scale)
        return blob

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        return SlotParts({n: (tensors[f"{n}.q"], tensors[f"{n}.scale"]) for n in self.weights},
                         {n: tensors[n] for n in self.biases})

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        q, scale = parts.weights[part]
        if x.shape[0] <= self._packed_rows:
            packed: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, q, scale)
            return packed
        if self.dtype == torch.float16:  # unscaled sums would overflow
            return torch.mm(x, (q.to(self.dtype) * scale[:, None]).t())
        return torch.mm(x, q.to(self.dtype).t()).mul_(scale)

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        q, scale = parts.weights[part]
        weight = (q.float() * scale.float()[:, None]).to(self.dtype)
        return weight.t() if self.is_transposed else weight
