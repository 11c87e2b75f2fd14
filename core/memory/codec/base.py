"""Interface and shared base of expert formats: encoding weights to bytes, byte layout, and matrix products.

An expert is a set of named parts: 2-D weight matrices ("gate_up_proj", "down_proj") and, in some models, 1-D biases.
`encode` turns the parts into the bytes kept on the host (the blob); `place` writes a blob into a device slot, whose
layout may differ (an instruction set's own packing); `views` gives typed tensors into a slot, created once and valid
whatever is written there later; `linear` multiplies by a part. A codec does not track which expert is in which slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.formats import Format, Numbers, name_of, numbers_of

if TYPE_CHECKING:
    from core.memory.codec.segments import Segments

Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # number type and shape of named tensors, in order

ALL = slice(None)
ALIGN = 64  # bytes: a cache line, and the alignment that AVX512 and CUDA copies prefer


class PartSpec(NamedTuple):
    """Shape and number type of one part of one expert, as the model declares it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_weight(self) -> bool:
        """True for a matrix, False for a bias."""
        return len(self.shape) == 2

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor inside a blob or slot; `offset` is in bytes, a multiple of ALIGN."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """This tensor as a view into `raw` (uint8 [bytes], itself aligned)."""
        return raw[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Named tensors in a contiguous byte range. `bytes` is the total, a multiple of ALIGN."""

    fields: Mapping[str, Field]
    bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
        """Lay tensors out consecutively, each aligned."""
        fields: dict[str, Field] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            fields[name] = Field(dtype, shape, end)
            end = -(-(end + fields[name].bytes) // ALIGN) * ALIGN
        return cls(fields, end)

    def views(self, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of all tensors by name in `raw` (uint8 [>= bytes])."""
        return {name: field.view(raw) for name, field in self.fields.items()}


class SlotParts:
    """Typed views into one slot: `weights[part]` are the tensors that the format stores for a matrix, `plain[part]` a
    bias [out], `at` the address of the slot's bytes."""

    __slots__ = ("at", "plain", "weights")

    def __init__(
        self, weights: Mapping[str, tuple[torch.Tensor, ...]], plain: Mapping[str, torch.Tensor], at: int = 0
    ) -> None:
        self.weights, self.plain, self.at = weights, plain, at


class Codec(Protocol):
    """A format for each matrix, made for one model's part shapes, one compute dtype and one device. Stateless,
    thread-safe.

    Layouts, slots and products are those of a block; only `encode` and `blob_bytes` are of whole experts.
    """

    name: str  # of the format, or of those of each matrix: see `core.memory.codec.formats.formats_of`
    formats: Mapping[str, Format]  # of each matrix
    is_plain: bool  # no matrix is held in codes
    numbers: Numbers  # number types in blobs, where a format does not prescribe them
    dtype: torch.dtype  # of activations, of biases in slots and of `dequantize`
    device: torch.device  # of slots; blobs are on the CPU
    blob_layout: Layout  # on the host; the same on every machine
    slot_layout: Layout  # on the device; may depend on its instruction set
    weights: list[str]  # the parts that are matrices
    verbatim: bool  # slot and blob layouts are equal: a blob may be read from disk straight into a slot

    def numbers_in(self, part: str) -> Numbers:
        """Number types of a matrix in blobs."""

    @property
    def blocks(self) -> int:
        """Equal parts that an expert is cached in, each in a slot of its own."""

    @property
    def whole(self) -> tuple[Codec, Segments] | None:
        """The codec of whole experts, and how its slots are cut into those of blocks; None where one is the other."""

    @property
    def unpacked_bytes(self) -> int:
        """Peak bytes while a matrix is dequantised to compute many rows with it; 0 where nothing is."""

    @property
    def blob_bytes(self) -> int:
        """Bytes of one encoded expert on the host, its blocks one after the other: the size of its copy."""

    @property
    def expert_layout(self) -> Layout:
        """A whole expert's blob, before it is cut into blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one encoded block."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block of an expert on the device."""

    def out_in(self, part: str) -> tuple[int, int]:
        """(out, in) features of a matrix, independent of how the model stores it."""

    def encode(self, parts: Mapping[str, torch.Tensor | QuantizedTensor]) -> torch.Tensor:
        """Encode one expert, given in the model's own layout and any float dtype, to host bytes (uint8 [blob_bytes],
        CPU).

        Codes already in the codec's own format are copied bit for bit; other codes are dequantised and rounded again.
        """

    def place(self, blob: torch.Tensor, slot: torch.Tensor) -> None:
        """Write a block's blob (uint8 [block_bytes]) into a slot (uint8 [>= slot_bytes]); asynchronous on the current
        CUDA stream when the blob is pinned."""

    def views(self, slot: torch.Tensor) -> SlotParts:
        """Typed views into a slot's bytes (uint8 [slot_bytes], aligned), without a copy; may be created before the slot
        is filled."""

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] by the part's matrix -> [..., out], without bias. `x` has the codec's dtype."""

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        """The part's matrix in the model's own layout and the codec's dtype: the reference for `linear`."""


class Base:
    """Shared by all formats: part bookkeeping, biases, and a copy into the slot that casts where types differ."""

    def __init__(
        self,
        formats: Mapping[str, Format],
        specs: Mapping[str, PartSpec],
        dtype: torch.dtype,
        device: torch.device,
        is_transposed: bool,
        numbers: Numbers,
    ) -> None:
        self.name, self.numbers = name_of(formats), numbers
        self.formats: Mapping[str, Format] = dict(formats)
        self.is_plain = all(one.is_plain for one in formats.values())
        self.specs, self.dtype, self.device, self.is_transposed = dict(specs), dtype, device, is_transposed
        self.weights = [n for n, s in specs.items() if s.is_weight]
        self.biases = [n for n, s in specs.items() if not s.is_weight]
        self._whole: tuple[Base, Segments] | None = None
        self.blob_layout, self.slot_layout = map(Layout.of, self.fields())
        self.verbatim = self.blob_layout == self.slot_layout

    def fields(self) -> tuple[Entries, Entries]:
        """What blobs and slots hold."""
        raise NotImplementedError

    def numbers_in(self, part: str) -> Numbers:
        """Number types of a matrix in blobs."""
        return numbers_of(self.formats[part], self.dtype, self.numbers)

    def be_block(self, whole: Base, cutter: Segments) -> None:
        """What this codec describes is a block of the experts that `whole` encodes."""
        assert all(one.layout == self.blob_layout for one in cutter.segments), "blocks of one expert differ"
        self._whole = whole, cutter

    @property
    def blocks(self) -> int:
        """Equal parts that an expert is cached in, each in a slot of its own."""
        return 1 if self._whole is None else len(self._whole[1].segments)

    @property
    def whole(self) -> tuple[Codec, Segments] | None:
        """The codec of whole experts, and how its slots are cut into those of blocks; None where one is the other."""
        if self._whole is None:
            return None
        whole, cutter = self._whole
        return cast("Codec", whole), cutter.of(whole.slot_layout)

    @property
    def unpacked_bytes(self) -> int:
        """Peak bytes while a matrix is dequantised to compute many rows with it; 0 where nothing is."""
        return 0

    def encode(self, parts: Mapping[str, torch.Tensor | QuantizedTensor]) -> torch.Tensor:
        """Encode one expert to host bytes. An expert of several blocks is encoded as a whole and then cut."""
        if self._whole is None:
            return self.encode_whole(parts)
        whole, cutter = self._whole
        return cutter.cut(whole.encode_whole(parts))

    def encode_whole(self, parts: Mapping[str, torch.Tensor | QuantizedTensor]) -> torch.Tensor:
        """Encode parts of the shapes that this codec was made for."""
        raise NotImplementedError

    def out_in(self, part: str) -> tuple[int, int]:
        """(out, in) features of a matrix, independent of how the model stores it."""
        rows, columns = self.specs[part].shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    def rows(self, weight: torch.Tensor | QuantizedTensor, at: slice = ALL) -> torch.Tensor:
        """Rows of a matrix as [out, in] fp32 on the codec's device, for quantisation there."""
        if isinstance(weight, QuantizedTensor):
            return (weight.turned() if self.is_transposed else weight).part(at).to(self.device).dequantized()
        return (weight.t() if self.is_transposed else weight)[at].to(self.device, torch.float32).contiguous()

    def begin_blob(
        self, parts: Mapping[str, torch.Tensor | QuantizedTensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A new blob with the biases filled in, and typed views of all its tensors."""
        blob = torch.zeros(self.blob_layout.bytes, dtype=torch.uint8)
        views = self.blob_layout.views(blob)
        for name in self.biases:
            bias = parts[name]
            assert isinstance(bias, torch.Tensor)
            views[name].copy_(bias)
        return blob, views

    @property
    def expert_layout(self) -> Layout:
        return self.blob_layout if self._whole is None else self._whole[0].blob_layout

    @property
    def block_bytes(self) -> int:
        return self.blob_layout.bytes

    @property
    def blob_bytes(self) -> int:
        return self.blocks * self.blob_layout.bytes

    @property
    def slot_bytes(self) -> int:
        return self.slot_layout.bytes

    def place(self, blob: torch.Tensor, slot: torch.Tensor) -> None:
        if self.verbatim:
            slot[: self.slot_bytes].copy_(blob[: self.block_bytes], non_blocking=True)
            return
        source = blob[: self.block_bytes].to(self.device, non_blocking=True)  # cast on the target device
        target = self.slot_layout.views(slot)
        for name, field in self.blob_layout.fields.items():
            target[name].copy_(field.view(source))
