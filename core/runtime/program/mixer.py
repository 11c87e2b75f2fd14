"""What mixes the tokens of a sequence in a layer, such as attention, and what the steps of a pass lend it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from core.hf.reserved_layers import Held, Part
from core.memory.codec.fast.steps import Steps, Work, named, some
from core.runtime.program import rms
from core.runtime.program.weights import FP32, NormWeight, Weight
from core.runtime.sequence_kv import SequenceKV

ACCEPTED = "accepted"  # names a number of rows that is known only after the pass


class Text(NamedTuple):
    """Some rows of a pass: the next tokens of one sequence, of which the last `kept` have logits."""

    kv: SequenceKV
    held: tuple[Held, ...]  # the memory of each layer
    rows: int
    kept: int


class Pass(Protocol):
    """The steps of a pass over all layers, in the order in which they are added, and the memory that they share."""

    steps: Steps
    texts: Sequence[Text]
    count: int  # rows of all texts
    positions: int  # the address of their positions, i64
    holds: bool  # some of the rows may be taken back: states are to be what they were
    later: list[Work]  # bring states up to date once it is known how many rows were accepted: at `ACCEPTED` in them

    def scratch(self, name: str, width: int, most: int = 0) -> torch.Tensor:
        """[T, width] fp32, or of `most` rows where T is more than that, the same for the same name and width: whatever
        asks for it writes it anew."""

    def angles(self, table: torch.Tensor) -> torch.Tensor:
        """The rows [T, n] of a table [context, n] at the positions."""

    def product(self, weights: Sequence[Weight], x: torch.Tensor, outs: Sequence[torch.Tensor]) -> list[int]:
        """Each of `outs` = x times a weight, all in one step."""


class Mixer(Protocol):
    """Of one layer. It keeps what it needs of the tokens before in the memory of the KV cache."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it keeps."""

    @property
    def weights(self) -> Iterator[Weight]:
        """What it multiplies by."""

    def steps_of(self, texts: Sequence[int]) -> int:
        """Steps that it adds at most, to a pass over texts of so many rows."""

    def add(self, to: Pass, number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Its steps, as layer `number`: from the normed rows `x` to what it adds to the residual stream, both [T, H]
        fp32."""


def norm(
    of: NormWeight,
    x: torch.Tensor,
    delta: torch.Tensor | None,
    out: torch.Tensor,
    scale: float = 1.0,
    factor: torch.Tensor | None = None,
) -> Work:
    """x += scale * delta, times a factor [1] in fp32 where there is one, and its norm."""
    kernel = rms.kernel(rms.Rms(of.form, FP32, adds=delta is not None, scale=scale, factor=factor is not None))
    at = {name: one for name, one in (("delta", delta), ("factor", factor)) if one is not None}
    strides = {"x_stride": x.stride(0) * 4, "out_stride": out.stride(0) * 4}
    given = named(rms.FIELDS, x=x, weight=of.at, out=out, **at, **strides)
    return Work(kernel, given, len(x), some(len(x)))


def row_at(tensor: torch.Tensor, number: int) -> int:
    """The address of a row."""
    return tensor.data_ptr() + number * tensor.stride(0) * tensor.itemsize
