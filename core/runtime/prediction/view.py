"""The predictor's view of a running model (core.policy.predict.base.View); computes only what is requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from core.hf.hooks import preferences
from core.hf.watch import Seen
from core.policy.predict.base import Later, Net, Prediction, PredictorProfile, State, union
from core.runtime.prediction.speculation import PredictedRouting
from core.runtime.program.routers import Answers

if TYPE_CHECKING:
    from core.runtime.prediction.predictor_host import PredictorHost


class EngineView:
    """The view for one call of one predictor. `seen` is the layer's router call, kept for predictors with `asks`;
    `weights` [T, k]; `answers`: what other routers have been asked already."""

    def __init__(
        self,
        predictor_host: PredictorHost,
        layer: int,
        ids: Sequence[Sequence[int]],
        weights: torch.Tensor | None,
        seen: Seen | None,
        answers: Answers | None = None,
    ) -> None:
        shape = predictor_host.shape
        self.layer, self.layers, self.experts, self.top_k = layer, shape.layers, shape.experts, shape.top_k
        self.request, self.tokens, self.ids = predictor_host.request, predictor_host.tokens, ids
        self.shares: Sequence[tuple[int, Sequence[int]]] = predictor_host.shares
        self.profile: PredictorProfile | None = predictor_host.profile
        self._predictor_host, self._weights, self._seen, self._answers = predictor_host, weights, seen, answers

    @property
    def weights(self) -> list[list[float]]:
        assert self._weights is not None, "nothing has been routed yet"
        rows: list[list[float]] = self._weights.float().tolist()
        return rows

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        if self._answers is not None and self._answers.layers == tuple(layers):  # of the state that they are asked for
            known = self._answers
            return _asked(known.logits.numpy().astype(np.float64), known.ids.numpy(), self.top_k)
        predicted = [self._predictor_host.ask(of, self.seen, self._state(of, state)) for of in layers]
        at = next((i for i, of in enumerate(layers) if self._kept(of)), None)
        if len(self.ids) > 1 and state != "last":
            ids = None if at is None else predicted[at].ids.long()
            scores, named = self._union(torch.stack([preferences(one) for one in predicted]), ids)
        else:
            rows = torch.cat([torch.cat((one.logits.float(), one.ids.float()), -1) for one in predicted]).cpu().numpy()
            chosen = rows[:, self.experts :].astype(np.int64)
            scores = _asked(rows[:, : self.experts].astype(np.float64), chosen, self.top_k)
            named = chosen[at or 0]
        if at is not None:
            self._keep(predicted[at].ids.long(), predicted[at].weights, scores[at], named)
        return scores

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        net = self._predictor_host.estimator
        probs = net.probabilities(self._state(layer, "default" if net.quasi else "hidden"), layer)
        ids = probs.topk(self.top_k).indices if self._kept(layer) else None
        scores, named = self._union(probs[None], ids)
        if ids is not None:
            self._keep(ids, self._predictor_host.rule(layer).weigh(probs.log(), ids), scores[0], named)
        predicted: npt.NDArray[np.float64] = scores[0]
        return predicted

    def distribution(self) -> Later:
        return self._predictor_host.distribution(self.seen)

    def embedding(self) -> Later:
        return _later(self._predictor_host.embed(self.tokens).float().mean(0))

    def path(self) -> Net:
        assert self.profile is not None
        return self.profile.net("path")

    @property
    def seen(self) -> Seen:
        """This layer's router call."""
        assert self._seen is not None and self._seen.layer == self.layer, "the router watched is not this layer's"
        return self._seen

    def _state(self, of: int, state: State) -> torch.Tensor:
        """[T, H] input for the router of layer `of`. Quasi-hidden: its norm, over the residual stream plus the average
        output of this layer's experts. A shared expert's output is not included; where a layer does more with its
        experts' output than adding it, or no norm feeds its router, the plain router input is used. Of the last token
        alone: [1, H]."""
        seen = self.seen
        if state == "last":
            return seen.hidden[-1:]
        default = (
            self._predictor_host.default(self.layer, of, self.ids, self._weights, seen) if state == "default" else None
        )
        return seen.hidden if default is None else default

    def _kept(self, layer: int) -> bool:
        """Whether the prediction for `layer` is kept as a routing."""
        return self._predictor_host.keeps_routing and layer == self.layer + 1

    def _keep(
        self, ids: torch.Tensor, weights: torch.Tensor, scores: npt.NDArray[np.float64], named: npt.NDArray[np.int64]
    ) -> None:
        """Keep the next layer's routing: ids and weights [T, k], the scores [E] and its distinct experts, in order for
        one token."""
        row: list[int] = named.tolist()
        experts = [Prediction(self.layer + 1, expert, float(scores[expert])) for expert in row]
        experts.sort(key=lambda prediction: -prediction.score)
        self._predictor_host.set_predicted(
            PredictedRouting(self.layer + 1, ids, weights, experts, row if len(self.ids) == 1 else None)
        )

    def _union(
        self, probs: torch.Tensor, ids: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """([n, E] probability that some token requests the expert, from [n, T, E]; the distinct experts of `ids` [T,
        k], in order for one token). Waits for the device once."""
        logs = torch.log1p(-probs.double().clamp_max(1.0)).sum(1)
        if ids is None:
            return union(logs.cpu().numpy(), self.top_k), np.empty(0, np.int64)
        place = torch.arange(1, ids.shape[1] + 1, dtype=logs.dtype, device=logs.device).repeat(1, len(ids))
        there = logs.new_zeros(1, self.experts).scatter_(1, ids.reshape(1, -1), place)
        rows = torch.cat((logs, there)).cpu().numpy()
        named = np.flatnonzero(rows[-1])
        return union(rows[:-1], self.top_k), named if len(ids) > 1 else named[np.argsort(rows[-1][named])]


def _asked(logits: npt.NDArray[np.float64], ids: npt.NDArray[np.int64], top_k: int) -> npt.NDArray[np.float64]:
    """For one token: logits [n, E] and the selected experts [n, k] -> [n, E] request probability. Selected experts come
    just above all others, as in `preferences`, here in numpy because it is faster for few numbers."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    row, others = np.arange(len(p))[:, None], p.copy()
    others[row, ids] = 0.0
    least = np.nextafter(others.max(1, keepdims=True).astype(np.float32), np.float32(2.0))  # survives rounding below
    p[row, ids] = np.maximum(p[row, ids], least)
    with np.errstate(divide="ignore"):
        return union(np.log1p(-np.minimum(p, 1.0)), top_k)


def mean_distribution(seen: Seen) -> Later:
    """[E] softmax of a router's logits, mean over the pass's tokens."""
    probs = seen.probs
    return _later(probs[0] if len(probs) == 1 else probs.mean(0))


def _later(values: torch.Tensor) -> Later:
    """Start a copy to the host; calling the result waits for it. `values` must not be modified meanwhile."""
    if values.device.type != "cuda":
        array: npt.NDArray[np.float32] = values.float().numpy()
        return Later(lambda: array)
    host = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> npt.NDArray[np.float32]:
        arrived.synchronize()
        landed: npt.NDArray[np.float32] = host.numpy()
        return landed

    return Later(wait, arrived.query)
