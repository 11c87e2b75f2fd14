"""What a checkpoint looks like to its readers, whatever it is on disk: named tensors, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from core.memory.codec.coded import QuantizedTensor


class Shape(Protocol):
    """What is known of a tensor before it is read. `dtype` is the number type that a dense copy of it is kept in."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Tensors(Protocol):
    """A checkpoint's tensors by the names that transformers knows, dequantised where they are stored as codes.

    Thread-safe. `close` releases the files and may be called twice.
    """

    @property
    def tensors(self) -> Mapping[str, Shape]: ...

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A whole tensor, or `row` of its first dimension as [1, ...]: a new CPU tensor, in the stated number type, or
        in fp32 where it is dequantised from codes that need more digits."""

    def coded(self, name: str, row: int | None = None) -> QuantizedTensor | None:
        """The same as codes, when it is stored as codes that one of our formats holds; else None."""

    def close(self) -> None: ...


class Stated(NamedTuple):
    """A plain `Shape`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
