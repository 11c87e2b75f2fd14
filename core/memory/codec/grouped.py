"""Quantised weights. Slots hold the blob's bytes, with biases in the compute dtype; products dequantise first, in fp32.
They are the reference of every faster one."""

import functools
from collections.abc import Mapping

import torch

from core.errors import ModelError
from core.memory.codec.base import Base, Entries, SlotParts
from core.memory.codec.bits import PLANES, pack, unpack
from core.memory.codec.coded import QuantizedTensor, dequantize
from core.memory.codec.fast.dequantize import dequantized, serves
from core.memory.codec.formats import FORMATS, Format
from core.memory.codec.matrix import Matrix, matrix
from core.memory.codec.quantize import CHUNK, QuantizedMatrix, quantize

STEP = 256  # rows dequantised at a time on a CPU: fits in its cache
CUDA_CHUNK = 1 << 22  # weights rounded or dequantised at a time on a GPU: 16 MiB in fp32, several times over
CHUNK_BYTES = 24  # of temporary memory for a weight, at most


class Grouped(Base):
    """Of a matrix [out, in] (however the model stores it) slots and blobs hold (q, [q1,] scale[, zero][, row])."""

    def fields(self) -> tuple[Entries, Entries]:
        fields: Entries = {n: (self.numbers.weight, self.specs[n].shape) for n in self.biases}
        for part in self.weights:
            fields |= self._fields(part)
        return fields, fields | {n: (self.dtype, self.specs[n].shape) for n in self.biases}

    def _fields(self, part: str) -> Entries:
        (out, columns), form, numbers = self.out_in(part), self.formats[part], self.numbers_in(part)
        group, grain = form.group, form.grain
        if grain and columns % grain:
            fitting = [f.name for f in FORMATS.values() if not f.is_plain and columns % (f.grain or 1) == 0]
            raise ModelError(
                f"{form.name} in groups of {grain} does not divide this model's {columns} inputs. Choose "
                f"another expert format: {', '.join([*fitting, 'checkpoint'])}."
            )
        planes = PLANES[form.bits]
        codes = torch.int8 if form.bits == 8 else torch.uint8
        fields: Entries = {f"{part}.q{i or ''}": (codes, (out, columns * plane // 8)) for i, plane in enumerate(planes)}
        groups = (out, columns // group) if group else (out,)
        fields[f"{part}.scale"] = (numbers.scale, groups)
        if form.zero:
            fields[f"{part}.zero"] = (numbers.zero, groups)
        if form.has_row_scale:
            fields[f"{part}.row"] = (torch.float32, (out,))
        if wide := form.wide:
            fields[f"{part}.row"] = (torch.float16, (out, columns // wide * (2 if form.zero else 1)))
        return fields

    def encode_whole(self, parts: Mapping[str, torch.Tensor | QuantizedTensor]) -> torch.Tensor:
        blob, views = self.begin_blob(parts)
        for name in self.weights:
            given, form = parts[name], self.formats[name]
            if isinstance(given, QuantizedTensor):
                held = (given.turned() if self.is_transposed else given).held_in(form.name)
                if held is not None:
                    self._write(views, name, slice(None), QuantizedMatrix(*held[1:]))
                    continue
            out, columns = self.out_in(name)
            step = max(1, (CHUNK if self.device.type == "cpu" else CUDA_CHUNK) // columns)
            for start in range(0, out, step):
                at = slice(start, start + step)
                self._write(views, name, at, quantize(self.rows(given, at), form, self.numbers_in(name)))
        return blob

    def _write(self, views: Mapping[str, torch.Tensor], part: str, at: slice, rounded: QuantizedMatrix) -> None:
        for i, plane in enumerate(pack(rounded.codes.contiguous(), self.formats[part].bits)):
            views[f"{part}.q{i or ''}"][at].copy_(plane)
        scale = views[f"{part}.scale"][at]
        scale.copy_(rounded.scale.reshape(scale.shape))
        if rounded.zero is not None:
            views[f"{part}.zero"][at].copy_(rounded.zero)
        if rounded.row is not None:
            row = views[f"{part}.row"][at]
            row.copy_(rounded.row.reshape(row.shape))

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        weights = {n: tuple(t for f, t in tensors.items() if f.startswith(n + ".")) for n in self.weights}
        return SlotParts(weights, {n: tensors[n] for n in self.biases}, slot.data_ptr())

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._dequantized(parts, part, fresh=False), bias)

    @property
    def unpacked_bytes(self) -> int:
        """Peak bytes while a matrix is dequantised."""
        if self.device.type != "cpu":
            sizes = [out * columns for out, columns in map(self.out_in, self.weights)]
            return max(n * self.dtype.itemsize + min(n, CUDA_CHUNK) * CHUNK_BYTES for n in sizes)
        beside = 0 if self._served else 4 * STEP * 4  # for each column, where torch's operations dequantise
        return max(columns * (out * self.dtype.itemsize + beside) for out, columns in map(self.out_in, self.weights))

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        weight = self._dequantized(parts, part)
        return weight.t() if self.is_transposed else weight

    def _dequantized(self, parts: SlotParts, part: str, *, fresh: bool = True) -> torch.Tensor:
        """[out, in] in the compute dtype, by a kernel where there is one; without `fresh` until the thread's next
        product."""
        if (one := self._served.get(part)) is None:
            return self.weight(part, parts.weights[part])
        return dequantized(one, parts.at, self.dtype, fresh=fresh)

    @functools.cached_property
    def _served(self) -> dict[str, Matrix]:
        """The matrices that this machine has kernels for."""
        found = {part: matrix(self, part) for part in self.weights} if self.device.type == "cpu" else {}
        return {part: one for part, one in found.items() if serves(one)}

    def weight(self, part: str, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[out, in] in the compute dtype, by torch's operations alone: what every kernel has to give."""
        form, rows = self.formats[part], tensors[0].shape[0]
        if self.device.type != "cpu":
            return self._weight_in_chunks(form, tensors, rows)
        if rows <= STEP:
            return self._weight(form, tensors)
        steps = [tuple(t[at : at + STEP] for t in tensors) for at in range(0, rows, STEP)]
        return torch.cat([self._weight(form, one) for one in steps])

    def _weight_in_chunks(self, form: Format, tensors: tuple[torch.Tensor, ...], rows: int) -> torch.Tensor:
        """The same on a GPU, without a second copy of the whole."""
        columns = tensors[0].shape[-1] * 8 // PLANES[form.bits][0]
        step = max(1, CUDA_CHUNK // columns)
        if rows <= step:
            return self._weight(form, tensors)
        whole = torch.empty(rows, columns, dtype=self.dtype, device=tensors[0].device)
        for at in range(0, rows, step):
            whole[at : at + step] = self._weight(form, tuple(t[at : at + step] for t in tensors))
        return whole

    def _weight(self, form: Format, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        planes = len(PLANES[form.bits])
        zero = tensors[planes + 1] if form.zero else None
        row = tensors[-1].view(len(tensors[-1]), -1) if form.has_row_scale or form.wide else None
        codes = unpack(tensors[:planes], form.bits)
        return dequantize(form, codes, tensors[planes], zero, row).to(self.dtype)
