"""The interface of a routing trace: its sizes, and its tokens in chunks of bounded size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

CHUNK = 4096  # tokens in one chunk, or a few more
RANKED = np.dtype([("of", "<i4"), ("at", "<i2"), ("layer", "<i2"), ("expert", "<i2"), ("score", "<f4")])
"""One guess of a predictor: in which pass (its place in the chunk) and in which layer it was made (-1 = before the
first), and what it was: an expert, its layer, and how likely it is asked for. A prediction is made when the predictor's
answer is there, so that one that comes late stands at the layer in which it came."""


BESIDE = np.dtype([("by", "<i2"), *RANKED.descr])
"""The same of predictors that were asked beside the one in use: `by` is the predictor's place in their list."""


def map_type(experts: int) -> np.dtype[Any]:
    """What a search found for a whole layer: in which pass and layer its answer came, the layer, and its distribution
    [experts]. Also of layers that were already passed when it came, for which there is no prediction."""
    return np.dtype([("of", "<i4"), ("at", "<i2"), ("layer", "<i2"), ("distribution", "<f4", (experts,))])


def beside_map_type(experts: int) -> np.dtype[Any]:
    """The same of predictors that were asked beside the one in use."""
    return np.dtype([("by", "<i2"), *map_type(experts).descr])


def id_type(experts: int) -> Any:
    """The smallest dtype that holds every expert id of a layer."""
    return np.uint8 if experts <= 256 else np.int16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive whole forward passes: p of them with n tokens in all. A token's ids are distinct unless it has fewer
    than k experts in a layer; then one of them is repeated."""

    ids: npt.NDArray[Any]  # uint8 or int16 [n, layers, k]
    sizes: npt.NDArray[np.int32]  # [p] tokens of each pass
    decode: npt.NDArray[np.bool_]  # [p] False = prefill
    rid: npt.NDArray[np.int32]  # [p] which request (answer)
    tok: npt.NDArray[np.int32] | None = None  # [n] input token ids
    weights: npt.NDArray[np.float16] | None = None  # [n, layers, k] gate weights, in the order of ids
    probs: npt.NDArray[np.float16] | None = None  # [n, layers, E] the router's full distributions
    ranked: npt.NDArray[Any] | None = None  # RANKED [g] the running predictor's predictions, in its order
    maps: npt.NDArray[Any] | None = None  # map_type [m] the maps that the running predictor found, in their order
    beside: npt.NDArray[Any] | None = None  # BESIDE [b] predictions of those asked beside it, of each in its order
    beside_maps: npt.NDArray[Any] | None = None  # beside_map_type [c] the maps that those found


class Trace(Protocol):
    """Read with `chunks`, as often as needed. `tokens` = their number; `model` is "" where unknown."""

    layers: int
    experts: int
    top_k: int
    model: str

    @property
    def tokens(self) -> int:
        """Tokens in all chunks."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the chunks from the first token to the last."""


class ArrayTrace:
    """A trace in memory, one pass per token."""

    def __init__(
        self,
        ids: npt.NDArray[Any],
        experts: int,
        *,
        model: str = "",
        rid: npt.NDArray[Any] | None = None,
        tok: npt.NDArray[Any] | None = None,
        weights: npt.NDArray[Any] | None = None,
    ) -> None:
        """`ids` and `weights` [tokens, layers, k], `rid` and `tok` [tokens]."""
        self._tokens: int = ids.shape[0]
        self.layers: int = ids.shape[1]
        self.top_k: int = ids.shape[2]
        self.experts, self.model = experts, model
        self._ids, self._rid, self._tok, self._weights = ids, rid, tok, weights

    @property
    def tokens(self) -> int:
        return self._tokens

    def chunks(self) -> Iterator[Chunk]:
        for start in range(0, self._tokens, CHUNK):
            part = slice(start, min(start + CHUNK, self._tokens))
            n = part.stop - start
            yield Chunk(
                np.ascontiguousarray(self._ids[part], id_type(self.experts)),
                np.ones(n, np.int32),
                np.ones(n, np.bool_),
                np.zeros(n, np.int32) if self._rid is None else self._rid[part].astype(np.int32),
                None if self._tok is None else self._tok[part].astype(np.int32),
                None if self._weights is None else self._weights[part].astype(np.float16),
            )
