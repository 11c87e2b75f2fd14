"""What a predictor can read when there is a recorded trace and no model."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.errors import TraceError
from core.policy.predict.base import Later, Net, PredictorProfile, State
from core.profile.trace import Chunk, Trace


class TraceView:
    """One pass of a trace, layer by layer (core.policy.predict.base.View). Asking for data that the trace does not have
    raises TraceError, which says how to record it."""

    def __init__(self, trace: Trace, chunk: Chunk, at: int, tokens: slice, profile: PredictorProfile | None) -> None:
        """Pass number `at` of `chunk`, with the slice `tokens` of its tokens; starts before the first layer."""
        self.layers, self.experts, self.top_k = trace.layers, trace.experts, trace.top_k
        self.layer, self.request = -1, int(chunk.rid[at])
        self.ids: Sequence[Sequence[int]] = ()
        self.tokens: Sequence[int] = () if chunk.tok is None else chunk.tok[tokens].tolist()
        self.shares: Sequence[tuple[int, Sequence[int]]] = ()
        self.profile = profile
        self._chunk, self._part = chunk, tokens
        self._ids = chunk.ids[tokens]

    def reach(self, layer: int) -> None:
        """Moves on to `layer`, which is now being computed."""
        self.layer, self.ids = layer, self._ids[:, layer].tolist()

    @property
    def weights(self) -> Sequence[Sequence[float]]:
        """[T][k] gate weights of this layer."""
        if self._chunk.weights is not None:
            rows: list[list[float]] = self._chunk.weights[self._part, self.layer].tolist()
            return rows
        probs = np.take_along_axis(self._probs(), self._ids[:, self.layer].astype(np.int64), 1)
        predicted: list[list[float]] = (probs / probs.sum(1, keepdims=True)).tolist()
        return predicted

    def distribution(self) -> Later:
        """[E] mean of the router's recorded distributions over the pass's tokens."""
        mean: npt.NDArray[np.float32] = self._probs().mean(0)
        return Later(lambda: mean)

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        """Raises TraceError: needs the model's hidden states."""
        raise self._blind()

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        """Raises TraceError: needs the model's hidden states."""
        raise self._blind()

    def embedding(self) -> Later:
        """Raises TraceError: needs the model's embeddings."""
        raise self._blind()

    def path(self) -> Net:
        """The profile's network. Raises TraceError when the trace has no token ids."""
        if not self.tokens:
            raise TraceError(
                "This prefetcher reads the tokens, which the trace does not have. Record it with `chat "
                "--record FILE --record-tokens`."
            )
        assert self.profile is not None
        return self.profile.net("path")

    def _probs(self) -> npt.NDArray[np.float32]:
        """[T, E] distributions of this layer's router. Raises TraceError when they were not recorded."""
        if self._chunk.probs is None:
            raise TraceError(
                "This prefetcher looks at the router's whole distributions, which the trace does not have."
                " Record it with `chat --record FILE --record-probs`."
            )
        return self._chunk.probs[self._part, self.layer].astype(np.float32)

    def _blind(self) -> TraceError:
        return TraceError(
            "This prefetcher looks at the model's hidden states, which no trace has. Record what it "
            "names with `chat --record-lab on --record FILE`, and simulate it on that."
        )
