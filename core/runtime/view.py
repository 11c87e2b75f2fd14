"""What a predictor sees of a running model (core.policy.predict.base.View); nothing is computed unasked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from core.hf.hooks import preferences
from core.hf.watch import Seen
from core.policy.predict.base import Facts, Later, PathNet, State, union

if TYPE_CHECKING:
    from core.runtime.foresight import Foresight


class View:
    """One look of one predictor. `seen` is the layer's router call, kept for predictors that ask; `weights` [T, k]."""

    def __init__(self, foresight: Foresight, layer: int, ids: Sequence[Sequence[int]], weights: torch.Tensor | None,
                 seen: Seen | None) -> None:
        shape = foresight.shape
        self.layer, self.layers, self.experts, self.top_k = layer, shape.layers, shape.experts, shape.top_k
        self.request, self.tokens, self.ids = foresight.request, foresight.tokens, ids
        self.profile: Facts | None = foresight.profile
        self._foresight, self._weights, self._seen = foresight, weights, seen

    @property
    def weights(self) -> list[list[float]]:
        assert self._weights is not None, "nothing has been routed yet"
        rows: list[list[float]] = self._weights.float().tolist()
        return rows

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        told = [self._foresight.ask(of, self.seen, self._state(of, state)) for of in layers]
        if len(self.ids) > 1:
            return self._union(torch.stack([preferences(one) for one in told]))
        rows = torch.cat([torch.cat((one.logits.float(), one.ids.float()), -1) for one in told]).cpu().numpy()
        return _asked(rows[:, : self.experts].astype(np.float64), rows[:, self.experts :].astype(np.int64), self.top_k)

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        probs = self._foresight.estimator.probabilities(self.seen.hidden, layer)
        told: npt.NDArray[np.float64] = self._union(probs[None])[0]
        return told

    def distribution(self) -> Later:
        return _later(self.seen.probs.mean(0))

    def embedding(self) -> Later:
        return _later(self._foresight.embed(self.tokens).float().mean(0))

    def path(self) -> PathNet:
        return self._foresight.path()

    @property
    def seen(self) -> Seen:
        """This layer's router call."""
        assert self._seen is not None and self._seen.layer == self.layer, "the router watched is not this layer's"
        return self._seen

    def _state(self, of: int, state: State) -> torch.Tensor:
        """[T, H] what the router of layer `of` is given. Quasi-hidden: its norm, over the residual stream with what
        this layer's experts return on average. A shared expert's part is not in it; where a layer does more with its
        experts' output than adding it, or no norm feeds its router, the plain router input stands in."""
        seen = self.seen
        default = self._foresight.default(self.layer, of, self.ids, self._weights, seen) if state == "default" else None
        return seen.hidden if default is None else default

    def _union(self, probs: torch.Tensor) -> npt.NDArray[np.float64]:
        """[n, T, E] -> [n, E]: some token asks. One wait for the device."""
        return union(torch.log1p(-probs.double().clamp_max(1.0)).sum(1).cpu().numpy(), self.top_k)


def _asked(logits: npt.NDArray[np.float64], ids: npt.NDArray[np.int64], top_k: int) -> npt.NDArray[np.float64]:
    """Of one token: logits [n, E] and the selected experts [n, k] -> [n, E] how likely it asks; what was selected comes
    just above all others, as in `preferences`, in numpy because a handful of numbers are quicker there."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    others = p.copy()
    np.put_along_axis(others, ids, 0.0, 1)
    least = np.nextafter(others.max(1, keepdims=True).astype(np.float32), np.float32(2.0))   # shows in what follows
    np.put_along_axis(p, ids, np.maximum(np.take_along_axis(p, ids, 1), least), 1)
    with np.errstate(divide="ignore"):
        return union(np.log1p(-np.minimum(p, 1.0)), top_k)


def _later(values: torch.Tensor) -> Later:
    """Copy to the host without waiting; whoever calls the result waits. `values` is nobody else's."""
    if values.device.type != "cuda":
        array: npt.NDArray[np.float32] = values.float().numpy()
        return lambda: array
    host = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> npt.NDArray[np.float32]:
        arrived.synchronize()
        landed: npt.NDArray[np.float32] = host.numpy()
        return landed

    return wait
