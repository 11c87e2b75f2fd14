"""What mixes the tokens of a sequence in a layer on a GPU: from normed rows to what is added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from core.memory.codec.fast.gpu.dense import NOTHING, DenseKernels, DenseProducts, End, Placed, Ready
from core.runtime.program.mixer import Text
from core.runtime.program.weights import NormWeight, Weight


class Rows(NamedTuple):
    """The rows of a pass, T in all, in a layer."""

    number: int  # of the layer
    texts: Sequence[Text]
    positions: torch.Tensor  # [T], int64
    most: int  # positions of each text at most, 0 = those that the host knows
    later: list[Callable[[int], None]] | None = None
    """Of a pass that leaves states as they are: gets what brings them to where they are after its first so many
    rows."""
    ready: Ready = NOTHING
    """What is prepared of the only normed row for the mixer's first product."""
    end: End | None = None
    """What its last product, of one row, goes on with."""


class GpuMixer(Protocol):
    """Of one layer; everything runs on the current stream. `first`: the product of the normed rows."""

    first: DenseProducts

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[T, H] fp32 that is added to the residual stream, of normed rows x [T, H] fp32."""


def product_of(kernels: DenseKernels, *weights: Weight) -> DenseProducts:
    """The product of rows by dense weights, one's results after the other's."""
    biases, bias = [one.bias for one in weights], None
    if (known := next((one for one in biases if one is not None), None)) is not None:  # to which -0 adds nothing
        nothing = [known.new_full((weight.outputs,), -0.0) for weight in weights]
        bias = torch.cat([none if one is None else one for one, none in zip(biases, nothing, strict=True)])
    return kernels.by([Placed(one.products.matrix, one.slot) for one in weights], bias)


def tensor_of(norm: NormWeight | None) -> torch.Tensor | None:
    """A norm's weights, which it is bound to."""
    owner = norm.owner if norm is not None else None
    return owner.detach() if isinstance(owner, torch.Tensor) else None
