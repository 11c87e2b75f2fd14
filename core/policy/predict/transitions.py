"""SLP: predicts that tokens with the same experts in one layer choose similar ones in the next."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Distance, Floor, Ints, Width, best, layer_ahead, limit, reach
from core.settings.registry import register

Singles = npt.NDArray[np.float32]


@register(
    "predictor",
    "transitions",
    title="Transition counts (SLP)",
    help="It counts which experts of the next layer "
    "were chosen after which of this one, and fetches those that followed this token's experts most often.",
    source="the spatial-locality predictor (SLP) that ExpertFlow compares with, after Lina (Li et al. 2023)",
)
class Transitions(Predictor):
    """Score of e: mean over the chosen experts s that were seen before of N[s, e] / N[s]; mean over tokens.

    N[s, e] = tokens that chose s in this layer and e `distance` layers later (past the last layer: the next token of
    the same request), N[s] = tokens that chose s and reached that layer. float32, 4 * L * E * E bytes."""

    def __init__(self, width: Width = 0, floor: Floor = 0.0, distance: Distance = 0) -> None:
        self._width, self._floor, self._distance = width, floor, distance or 1
        self._pairs: Singles = np.zeros((0, 0, 0), np.float32)  # [L, E, E]
        self._from: Singles = np.zeros((0, 0), np.float32)  # [L, E]
        self._rows: dict[int, Ints] = {}  # layer -> its last choice [T, k]
        self._before: tuple[int, int] | None = None  # request and layer of the last call
        self._follows = False  # this pass continues where the last one ended

    def predict(self, view: View) -> Sequence[Prediction]:
        ids: Ints = np.array(view.ids, np.int64)
        if not len(self._pairs):
            self._pairs = np.zeros((view.layers, view.experts, view.experts), np.float32)
            self._from = np.zeros((view.layers, view.experts), np.float32)
        if view.layer == 0:
            self._follows = self._before == (view.request, view.layers - 1)
        self._before = view.request, view.layer
        self._learn(view, ids)
        ahead = layer_ahead(view, self._distance)
        source = ids if ahead > view.layer else ids[-1:]
        return best(ahead, self._scores(view.layer, source), limit(view, ahead, self._width), self._floor)

    def _learn(self, view: View, ids: Ints) -> None:
        """Count the transitions to this choice; with several tokens, also those into the next token's first layers."""
        layer, rows, distance = view.layer, self._rows, reach(view, self._distance)
        if layer >= distance:
            self._count(layer - distance, rows[layer - distance], ids)
        elif self._follows:
            source = layer - distance + view.layers
            self._count(source, rows[source][-1:], ids[:1])
        rows[layer] = ids
        if layer + distance >= view.layers and len(ids) > 1:
            self._count(layer, ids[:-1], rows[layer + distance - view.layers][1:])

    def _count(self, layer: int, source: Ints, target: Ints) -> None:
        """Count transitions from `source` [T, k] at `layer` to `target` [T, k]."""
        if len(source) == 1:
            self._pairs[layer, source[0][:, None], target[0]] += 1.0
            self._from[layer, source[0]] += 1.0
            return
        ones: list[Singles] = []
        for ids in (source, target):
            rows: Singles = np.zeros((len(ids), self._from.shape[1]), np.float32)
            np.put_along_axis(rows, ids, 1.0, axis=1)
            ones.append(rows)
        self._pairs[layer] += ones[0].T @ ones[1]
        self._from[layer] += ones[0].sum(0)

    def _scores(self, layer: int, ids: Ints) -> Singles:
        """[E] mean over the tokens `ids` [T, k]; 0 for a token none of whose experts has been seen at `layer`."""
        if len(ids) == 1:
            rows, came = ids[0], self._from[layer, ids[0]]
            share: npt.NDArray[np.float64] = np.array(1.0 / max(1, int(np.count_nonzero(came > 0))))
        else:
            rows, came = np.arange(self._from.shape[1]), self._from[layer]
            seen = came[ids] > 0  # [T, k]
            shares = seen / np.maximum(seen.sum(1, keepdims=True), 1) / len(ids)
            share = np.bincount(ids.ravel(), shares.ravel(), len(came)).astype(np.float64)
        each = (share / np.where(came > 0, came, np.inf)).astype(np.float32)
        scores: Singles = np.minimum(each @ self._pairs[layer, rows], np.float32(1.0))
        return scores
