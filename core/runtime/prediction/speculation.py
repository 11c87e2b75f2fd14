"""Speculative execution: a layer computes the routing that was predicted for it instead of its router's own.

Source: Speculating Experts section 4 and Algorithm 1. The routing predicted in layer l for layer l +
1 is kept on the device as [T, k], prefetched, and computed; nothing else is fetched for that layer. Layer 0 always uses
its router, and so does a prompt unless asked otherwise: it needs nearly all experts anyway (section 5.2).

A prediction comes from a router evaluated early, whose output has weights as well as experts, or from the
estimator: its distribution p has no weights, so the router's weighting rule is applied to log p in place of logits. For
softmax routers this equals their own result for p; for a sigmoid router p determines the logits up to one constant per
token, and log p is the choice that keeps weights proportional to small p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from core.memory.to_device import to_device
from core.policy.predict import Prediction
from core.types import Phase

if TYPE_CHECKING:
    from core.runtime.prediction.predictor_host import PredictorHost


class PredictedRouting(NamedTuple):
    """The routing of `layer` as predicted in the layer before: `ids` int64 and `weights` [T, k], on the device.
    `experts`: the distinct ones, likeliest first. `row`: `ids` of a single token, on the host."""

    layer: int
    ids: torch.Tensor
    weights: torch.Tensor
    experts: list[Prediction]
    row: list[int] | None = None

    def first(self, predictions: Sequence[Prediction], *, certain: bool) -> list[Prediction]:
        """`predictions` with all of `experts` put first, whether it contains them or not, with scores at least as high
        as the highest of the others; `certain`: with probability 1."""
        mine = {expert for _, expert, _ in self.experts}
        others = [
            prediction for prediction in predictions if prediction.layer != self.layer or prediction.expert not in mine
        ]
        least = 1.0 if certain else max((prediction.score for prediction in others), default=0.0)
        return [*(Prediction(layer, expert, max(score, least)) for layer, expert, score in self.experts), *others]


class Executed(NamedTuple):
    """The routing to compute. Experts that the router chose too keep its positions; `changed` [T, k] marks positions
    with another expert. With nothing changed `ids` and `weights` are the router's own tensors."""

    ids: torch.Tensor
    weights: torch.Tensor
    changed: torch.Tensor


class Executing:
    """For one model. Call `use` only between two passes, `begin` before each, and everything on the compute thread.
    Nothing here waits for the device except `take_reweighed`, when there is something to count."""

    def __init__(self, predictor_host: PredictorHost) -> None:
        self._predictor_host = predictor_host
        self._reweighed: torch.Tensor | None = None  # a count, on the device
        self.use("off")

    def use(self, mode: str, weights: str = "predicted", share: float = 1.0, *, prefill: bool = False) -> None:
        """`mode`: "off"; "always" = every token of every layer but the first takes the predicted experts, with the
        predicted `weights` ("predicted") or those that the router's actual logits give them ("true"); "verify" = a
        token takes them, with the actual router's weights, only where they carry at least `share` of the probability of
        its own choice (0 = always; 1 = only where both are the same experts, so that nothing changes). The predictor
        must have `executes`. `prefill`: prompts take them, too."""
        self.mode, self._true, self._share, self._prefill = mode, weights == "true", share, prefill
        self._reweighed = None
        self.begin("decode")

    def begin(self, phase: Phase) -> None:
        """A pass begins: sets whether it executes predictions, and so whether they are kept."""
        self._acts = self.active and (self._prefill or phase == "decode")
        self._predictor_host.keep_routing(self._acts, certain=self.mode == "always")

    @property
    def active(self) -> bool:
        """Whether predictions are executed, in some passes at least."""
        return self.mode != "off"

    def route(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, asked: Sequence[Sequence[int]]) -> Executed:
        """The routing to compute in place of the router's `ids` [T, k], which the host knows as `asked`, and `weights`
        [T, k]."""
        predicted = self._predictor_host.take_predicted(layer)
        if not self._acts or predicted is None or predicted.ids.shape != ids.shape or _repeats(predicted, asked):
            return Executed(ids, weights, torch.zeros_like(ids, dtype=torch.bool))
        if predicted.row is None:
            place, changed = aligned(predicted.ids, ids)
        else:
            place, changed = (to_device([one], ids.device) for one in aligned_row(predicted.row, asked[0]))
        taken = predicted.ids.gather(1, place)
        if self.mode == "always" and not self._true:
            found = predicted.weights.gather(1, place).to(weights.dtype)
            count = ((found != weights) & ~changed).sum()
            self._reweighed = count if self._reweighed is None else self._reweighed + count
            return Executed(taken, found, changed)
        rule, logits = self._predictor_host.rule(layer), self._predictor_host.output(layer).logits
        if self.mode == "verify":
            changed = changed & self._carried(rule.scores(logits), taken, ids)
        differs = changed.any(-1, keepdim=True)  # unchanged tokens keep the router's values exactly
        found = torch.where(differs, rule.weigh(logits, taken).to(weights.dtype), weights)
        return Executed(torch.where(differs, taken, ids), found, changed)

    def take_reweighed(self) -> int:
        """Number of assignments since the last call to experts that the router chose too, but with a weight other than
        its own: not `changed`, and not exact. Counted while predicted weights are executed."""
        count, self._reweighed = self._reweighed, None
        return 0 if count is None else int(count)

    def _carried(self, scores: torch.Tensor, taken: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, 1] whether the predicted experts carry enough of the probability of the chosen ones."""
        if self._share >= 1.0:
            return torch.zeros_like(ids[:, :1], dtype=torch.bool)  # two sets may carry the same probability
        return scores.gather(1, taken).sum(-1, True) >= self._share * scores.gather(1, ids).sum(-1, True)


def _repeats(predicted: PredictedRouting, asked: Sequence[Sequence[int]]) -> bool:
    """Whether an expert stands for identity experts in one token's choice, or in what was predicted for it: their
    weights are not predicted (LongCat-Flash)."""
    return predicted.row is not None and any(len({*one}) < len(one) for one in (predicted.row, asked[0]))


def aligned(predicted: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(`place` [T, k], `changed` [T, k]): told.gather(1, place) has the experts in both where `ids` has them, and its
    other experts, in order, at the positions that are `changed`. No expert occurs twice in a row of either."""
    same = predicted[:, :, None] == ids[:, None, :]  # [T, predicted, ids]
    changed = ~same.any(1)
    spare = same.any(2).byte().argsort(dim=1, stable=True)  # predicted experts not in `ids` come first
    free = (~changed).byte().argsort(dim=1, stable=True)
    place = torch.empty_like(spare).scatter_(1, free, spare)
    return torch.where(changed, place, same.byte().argmax(1)), changed


def aligned_row(predicted: Sequence[int], ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The same for one token, on the host."""
    at, own = {expert: i for i, expert in enumerate(predicted)}, set(ids)
    spare = (i for i, expert in enumerate(predicted) if expert not in own)
    return [at[expert] if expert in at else next(spare) for expert in ids], [expert not in at for expert in ids]


class PredictedScores:
    """The scores of the latest predictions for each layer, until the substitutes that use them take them."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._scores: dict[int, dict[int, float]] = {}

    def note(self, predictions: Sequence[Prediction]) -> None:
        """Store predictions made together; they replace earlier ones for the same layers."""
        fresh: dict[int, dict[int, float]] = {}
        for layer, expert, score in predictions:
            fresh.setdefault(layer, {})[expert] = score
        self._scores |= fresh

    def take(self, layer: int, device: torch.device) -> torch.Tensor:
        """[E] fp32 on `device`: the score of each expert of `layer`; 0 = not predicted since the last call. Removes the
        scores."""
        scores = self._scores.pop(layer, {})
        row = [0.0] * self._experts
        for expert, score in scores.items():
            row[expert] = score
        return to_device(row, device, torch.float32)
