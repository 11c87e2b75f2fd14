"""Unquantised weights. Blobs keep their own number type; slots have the compute dtype."""

import functools
from collections.abc import Mapping

import torch

from core.memory.codec.base import Base, Entries, LinearWay, SlotParts
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.kernel_choice import kind
from core.memory.codec.matrix import matrix
from core.memory.codec.native.choice import TILES, TORCH, Choice, choice_of
from core.memory.codec.native.tile_products import ExactTiles, by_onednn, serves
from core.system.native import openmp


class Plain(Base):
    """`linear` runs the same matrix product that transformers' grouped_mm runs per expert on a CPU: bit-identical."""

    def fields(self) -> tuple[Entries, Entries]:
        blob: Entries = {name: (self.numbers.weight, spec.shape) for name, spec in self.specs.items()}
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
        tiles = self._tiles.get(part) if len(x) > 1 else None
        if tiles is not None and self._choices[part].way(len(x)) == TILES:
            return self._by_tiles(part, parts, x)
        return torch.mm(x, parts.weights[part][0])

    def ways(self, part: str) -> dict[str, LinearWay]:
        """Of the same bits. Where oneDNN has a kernel for every number of rows, there are no two: one that it has at
        hand is fast, but a prompt has more numbers than it keeps."""
        if part not in self._tiles or by_onednn() or self._tiles[part].exact(2) is None:
            return {}
        return {TORCH: functools.partial(self._by_torch, part), TILES: functools.partial(self._by_tiles, part)}

    def _by_torch(self, part: str, parts: SlotParts, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, parts.weights[part][0])

    def _by_tiles(self, part: str, parts: SlotParts, x: torch.Tensor) -> torch.Tensor:
        """By tiles, where these have torch's bits."""
        made = self._tiles[part].many(parts.at, x)
        return self._by_torch(part, parts, x) if made is None else made

    @functools.cached_property
    def _choices(self) -> dict[str, Choice]:
        single = not openmp.entry() and torch.get_num_threads() > 1  # one thread of ours is slower than all of torch's
        return {
            part: choice_of(kind(self, part), TILES if by_onednn() and not single else TORCH) for part in self._tiles
        }

    @functools.cached_property
    def _tiles(self) -> dict[str, ExactTiles]:
        """Of the matrices that there are such kernels for."""
        found = {part: matrix(self, part) for part in self.weights} if self.device.type == "cpu" else {}
        return {part: ExactTiles(one) for part, one in found.items() if serves(one, self.dtype)}

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        weight = parts.weights[part][0]
        return weight if self.is_transposed else weight.t()
