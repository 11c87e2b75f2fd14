"""Interface of a checkpoint, independent of its format on disk: named tensors, read one at a time."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from core.memory.codec.coded import QuantizedTensor


class Shape(Protocol):
    """What is known of a tensor before it is read. `dtype` is the number type of its dense copy."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Tensors(Protocol):
    """A checkpoint's tensors under transformers' names, dequantised where they are stored as codes.

    Thread-safe. `close` releases the files and may be called twice.
    """

    @property
    def tensors(self) -> Mapping[str, Shape]: ...

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A whole tensor, or `row` of its first dimension as [1, ...]: a new CPU tensor in the stated number type, or
        in fp32 where it is dequantised from codes that need more precision."""

    def coded(self, name: str, row: int | None = None) -> QuantizedTensor | None:
        """The same tensor as codes if one of our formats can hold them; else None."""

    def close(self) -> None: ...


class TensorShape(NamedTuple):
    """A plain implementation of `Shape`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
