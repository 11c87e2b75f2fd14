"""What a predictor is: it looks at the layer that is about to be computed and names experts of later layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Guess(NamedTuple):
    """One expert that may be needed: higher `score` is fetched first."""

    layer: int
    expert: int
    score: float


class View(Protocol):
    """What a predictor may look at while layer `layer` is computed."""

    layer: int
    layers: int
    experts: int                   # of one layer
    top_k: int
    request: int                   # grows with every prompt: the tokens of one number are one conversation turn
    ids: Sequence[Sequence[int]]   # [T][k] experts the router just chose

    def gate(self, layer: int) -> npt.NDArray[np.float32]:
        """[E] how strongly the router of `layer` would ask for each expert, were it given this layer's router input;
        softmax probabilities summed over the pass's tokens. Evaluated on the device, only when asked for."""


class Predictor(Protocol):
    """Names experts to fetch. Stateless or not, it is called once a layer, in order; a pass starts at layer 0."""

    looks: ClassVar[bool] = True    # False: never called, so nothing is recorded for it
    asks: ClassVar[bool] = False    # True: it calls `view.gate`, so what routers are given is kept for it

    def predict(self, view: View) -> Sequence[Guess]:
        """Experts of later layers (or of the first layers of the next token, asked for at the last ones), best
        first."""
