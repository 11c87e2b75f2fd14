"""Products that read slots directly on a CPU, by own kernels: core.memory.codec.native."""

import functools
from collections.abc import Callable, Sequence

import torch

from core.memory.codec.base import Codec, LinearWay, SlotParts
from core.memory.codec.grouped import Grouped
from core.memory.codec.kernel_choice import kind
from core.memory.codec.matrix import matrix
from core.memory.codec.native import plain
from core.memory.codec.native.choice import CODES, Choice, choice_of
from core.memory.codec.native.plain import PlainProducts
from core.memory.codec.native.products import STATES, Products, serves
from core.memory.codec.plain import Plain


def _by(way: Callable[[int, torch.Tensor], torch.Tensor], parts: SlotParts, x: torch.Tensor) -> torch.Tensor:
    return way(parts.at, x)


class FusedCodec(Grouped):
    """Quantised weights, in bf16 or fp16. Slots have the layout of the portable form; `weight` stays its reference."""

    direct = True
    at_once = STATES  # states of one expert that `several` takes together

    @functools.cached_property
    def _products(self) -> dict[str, Products]:
        """Compiled at the first product, because imports and estimates create codecs too."""
        return {part: Products(matrix(self, part), self.dtype) for part in self.weights}

    @functools.cached_property
    def _choices(self) -> dict[str, Choice]:
        return {part: choice_of(kind(self, part), CODES) for part in self.weights}

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        products = self._products[part]
        way = self._choices[part].way(x.numel() // products.matrix.inputs)
        return products.ways[way](parts.at, x)

    def ways(self, part: str) -> dict[str, LinearWay]:
        return {name: functools.partial(_by, way) for name, way in self._products[part].ways.items()}

    def stacked(self, many: Sequence[SlotParts], part: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply one state by the part's matrix of each expert in `many`: x [many, in], or [1, in] shared -> [many,
        out]."""
        return self._products[part].few([parts.at for parts in many], x)

    def several(self, runs: Sequence[tuple[int, Sequence[SlotParts]]], part: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply consecutive states by the part's matrix of each expert: of each run (states, experts) so many rows
        of x [all, in] for every expert -> [all, out]. A row's result is the one that `stacked` has."""
        return self._products[part].several([(count, [one.at for one in many]) for count, many in runs], x)

    @property
    def unpacked_bytes(self) -> int:
        return max(out * columns for out, columns in map(self.out_in, self.weights)) * self.dtype.itemsize


def supported(codec: Grouped) -> bool:
    """Whether this machine has kernels for all matrices of a codec."""
    if codec.format.wide:  # dequantised in the reference; `core.memory.codec.fast` has kernels for them
        return False
    return codec.device.type == "cpu" and all(serves(matrix(codec, part), codec.dtype) for part in codec.weights)


class PlainRows:
    """Products of unquantised weights by own kernels: sums are fp32, and rounded once."""

    at_once = plain.STATES

    def __init__(self, codec: Plain) -> None:
        self._codec = codec

    @functools.cached_property
    def _products(self) -> dict[str, PlainProducts]:
        """Compiled at the first product, because imports and estimates create codecs too."""
        return {part: PlainProducts(matrix(self._codec, part)) for part in self._codec.weights}

    def several(self, runs: Sequence[tuple[int, Sequence[SlotParts]]], part: str, x: torch.Tensor) -> torch.Tensor:
        """As `FusedCodec.several`."""
        return self._products[part].several([(count, [one.at for one in many]) for count, many in runs], x)


def row_products(codec: Codec) -> FusedCodec | PlainRows | None:
    """What multiplies many states, each by the matrix of its own slot, in one call; None where no kernel does."""
    if isinstance(codec, FusedCodec):
        return codec
    if not isinstance(codec, Plain) or codec.device.type != "cpu":
        return None
    return PlainRows(codec) if all(plain.serves(matrix(codec, part)) for part in codec.weights) else None
