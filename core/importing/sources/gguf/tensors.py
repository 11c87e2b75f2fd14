"""Presents a GGUF model's tensors under the names and shapes of transformers' checkpoints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from core.errors import ModelError
from core.hf.tensors import TensorShape
from core.importing.sources.gguf.blocks import decode
from core.importing.sources.gguf.files import OpenFiles
from core.memory.codec.coded import QuantizedTensor, alike
from core.memory.codec.formats import format_of
from core.system.gguf import TensorInfo, gguf_package

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 16 << 20  # bytes dequantised at a time

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Pieces [..., out, in] -> the tensor as transformers has it. Moves weights about, so it works on codes as well."""


class TensorRows(NamedTuple):
    """A stored tensor, or some of its output rows (of each expert, where experts are stacked)."""

    name: str
    rows: tuple[int, int] | None = None


class TensorRecipe(NamedTuple):
    """How to build one of transformers' tensors. `expert`: the row of the stacked pieces to use."""

    pieces: tuple[TensorRows, ...]
    shape: tuple[int, ...]
    merge: Merge
    expert: int | None = None
    is_expert: bool = False  # part of a routed expert: dequantised to fp32, or read as codes


def check_types(entries: Iterable[TensorInfo]) -> None:
    """Raises ModelError when the installed gguf package cannot dequantise one of the types."""
    gguf = gguf_package()
    for type in {entry.type for entry in entries} - set(PLAIN):
        kind = gguf.GGMLQuantizationType[type]
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            raise ModelError(
                f"This GGUF model has weights of the type {type}, which the installed package `gguf` "
                "cannot read. Update it (pip install -U gguf), or use another quantization."
            ) from None


class GgufTensors:
    """`core.hf.tensors.Tensors` of a GGUF model. Thread-safe.

    Number types: as stored where they are plain, else `dense_dtype`; experts are dequantised to fp32. A tensor
    NAME.scale has what NAME.weight is multiplied by: one number, or one an expert.
    """

    def __init__(
        self,
        files: OpenFiles,
        entries: Mapping[str, TensorInfo],
        recipes: Mapping[str, TensorRecipe],
        dense_dtype: torch.dtype,
        factors: Mapping[str, TensorInfo] = MappingProxyType({}),
    ) -> None:
        """`factors`: the tensors of what weights are multiplied by, by these weights' names."""
        self._files, self._entries, self._recipes, self._factors = files, entries, recipes, factors
        self._dense_dtype = dense_dtype
        self.tensors: dict[str, TensorShape] = {n: TensorShape(self._stated(r), r.shape) for n, r in recipes.items()}

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        recipe = self._recipes[name]
        if row is not None and not self._is_stack(recipe):
            return self.read(name)[row : row + 1].clone()
        rounded = any(self._entries[p.name].type not in PLAIN for p in recipe.pieces)
        dtype = torch.float32 if recipe.is_expert and rounded else self.tensors[name].dtype
        index = recipe.expert if row is None else row
        merged = recipe.merge([self._weights(p, index, dtype) for p in recipe.pieces])
        return (merged if row is not None else merged.reshape(recipe.shape)).contiguous()

    def coded(self, name: str, row: int | None = None) -> QuantizedTensor | None:
        recipe = self._recipes[name]
        if not recipe.is_expert or (row is not None and not self._is_stack(recipe)):
            return None
        parts = [self._coded(p, recipe.expert if row is None else row) for p in recipe.pieces]
        codes = alike([part for part in parts if part is not None]) if None not in parts else ()
        if not codes:
            return None

        def merge(planes: Sequence[torch.Tensor]) -> torch.Tensor:
            merged = recipe.merge(planes)
            return (merged if row is not None or recipe.expert is None else merged.squeeze(0)).contiguous()

        zeros = [c.zero for c in codes if c.zero is not None]
        factors = [c.row for c in codes if c.row is not None]
        return QuantizedTensor(
            codes[0].format,
            merge([c.codes for c in codes]),
            merge([c.scale for c in codes]),
            merge(zeros) if zeros else None,
            merge(factors) if factors else None,
        )

    def stored_as(self, name: str) -> str:
        """The types of a tensor's pieces: "Q4_K"."""
        return " and ".join(dict.fromkeys(self._entries[piece.name].type for piece in self._recipes[name].pieces))

    def close(self) -> None:
        self._files.close()

    def _stated(self, recipe: TensorRecipe) -> torch.dtype:
        types = [PLAIN.get(self._entries[p.name].type, self._dense_dtype) for p in recipe.pieces]
        dtype = types[0]
        for other in types[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    def _is_stack(self, recipe: TensorRecipe) -> bool:
        """Whether each row of the tensor is built from the same row of each piece."""
        return (
            recipe.is_expert
            and recipe.expert is None
            and all(self._entries[p.name].shape[0] == recipe.shape[0] for p in recipe.pieces)
        )

    def _coded(self, piece: TensorRows, index: int | None) -> QuantizedTensor | None:
        entry = self._entries[piece.name]
        if entry.type in PLAIN:
            return None
        coded = decode(entry.type, self._raw(entry, *_span(entry, piece, index)))
        if coded is None or piece.name not in self._factors:
            return coded
        if coded.row is None or format_of(coded.format).wide:
            return None  # no place for a factor, or none of fp32
        return coded._replace(row=coded.row * self._factor(piece.name, index))

    def _factor(self, name: str, index: int | None) -> torch.Tensor:
        """What a weight, or `index` of its first dimension, is multiplied by: [experts or 1, 1, 1], or [1]."""
        at = self._factors[name]
        factor = self._files.read(at.file, at.offset, at.bytes).view(torch.float32)
        if len(self._entries[name].shape) < 3:
            return factor
        return (factor if index is None or len(factor) == 1 else factor[index : index + 1]).view(-1, 1, 1)

    def _weights(self, piece: TensorRows, index: int | None, dtype: torch.dtype) -> torch.Tensor:
        """A piece, or `index` of its first dimension as [1, ...], in `dtype`; dequantised as the gguf package does."""
        entry = self._entries[piece.name]
        if piece.name in self._factors and (coded := self._coded(piece, index)) is not None:
            return coded.dequantized().to(dtype)
        if piece.rows is not None and index is None:
            return torch.cat([self._weights(piece, i, dtype) for i in range(entry.shape[0])])
        first, shape = _span(entry, piece, index)
        out = torch.empty(shape, dtype=torch.float32 if piece.name in self._factors else dtype)
        flat = out.view(-1, shape[-1])
        step = max(1, CHUNK // _row_bytes(entry))
        for start in range(0, flat.shape[0], step):
            count = min(step, flat.shape[0] - start)
            flat[start : start + count] = self._dequantised(entry, first + start, count)
        return out.mul_(self._factor(piece.name, index)).to(dtype) if piece.name in self._factors else out

    def _dequantised(self, entry: TensorInfo, first: int, rows: int) -> torch.Tensor:
        raw = self._raw(entry, first, (rows, entry.shape[-1]))
        if entry.type in PLAIN:
            return raw.view(PLAIN[entry.type])
        gguf = gguf_package()
        return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[entry.type]))

    def _raw(self, entry: TensorInfo, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Bytes of the rows from `first` on that hold weights of `shape`: uint8 [..., bytes of a row]."""
        size = _row_bytes(entry)
        rows = torch.Size(shape[:-1]).numel()
        return self._files.read(entry.file, entry.offset + first * size, rows * size).view(*shape[:-1], size)


def _span(entry: TensorInfo, piece: TensorRows, index: int | None) -> tuple[int, tuple[int, ...]]:
    """The first stored row to read, and the shape of the result: rows are runs along the last dimension."""
    if index is None:
        return 0, entry.shape
    inner = torch.Size(entry.shape[1:-1]).numel() if len(entry.shape) > 1 else 1
    begin, end = piece.rows or (0, inner)
    shape = (1, end - begin, entry.shape[-1]) if len(entry.shape) == 3 else (1, *entry.shape[1:])
    return index * inner + begin, shape


def _row_bytes(entry: TensorInfo) -> int:
    return entry.bytes // torch.Size(entry.shape[:-1]).numel()
