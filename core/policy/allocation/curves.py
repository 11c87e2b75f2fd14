"""What the caches of a model hit at every size, and what a predictor's ranking is worth: the statistics from which
MoEpic's cache configurator plans (section 3.4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.allocation.weights import hit_curves

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Per layer, over `tokens` decoded tokens; C = experts that the layer's cache holds, y = place in the ranking that
    a predictor gives of the layer's experts before its routing is known, the likeliest first.

    `hit` [L, E + 1] = H(C), the share of requests found in a cache of C experts. `chosen` [L, Y] = P(y), how often the
    y-th of the ranking was requested, per token. `cached` [L, E + 1, Y] = PH(y, C), how often the y-th of the ranking
    was in a cache of C experts, per token. All in [0, 1]; Y may be 0, which is a model without predictions."""

    top_k: int
    tokens: int
    hit: Floats
    chosen: Floats
    cached: Floats

    def __post_init__(self) -> None:
        """Raises ValueError when the arrays do not belong together."""
        layers, sizes = self.hit.shape
        if self.chosen.shape[:1] != (layers,) or self.cached.shape != (layers, sizes, self.chosen.shape[1]):
            raise ValueError(f"curves {self.hit.shape}, {self.chosen.shape} and {self.cached.shape} do not fit")

    @property
    def layers(self) -> int:
        """L."""
        return int(self.hit.shape[0])

    @property
    def experts(self) -> int:
        """E."""
        return int(self.hit.shape[1]) - 1

    @property
    def recall(self) -> Floats:
        """[L] share of a layer's requests among the first k of the ranking."""
        found: Floats = self.chosen[:, : self.top_k].sum(1) / self.top_k
        return found

    def with_recall(self, recall: npt.NDArray[Any]) -> Curves:
        """These hit rates, with the predictions that a recall@k [L] stands for where no ranking was recorded: k
        predictions a token, each right so often (NaN: none), and in the cache as often as what is requested."""
        right = np.nan_to_num(np.asarray(recall, np.float64))
        chosen = np.repeat(right[:, None], self.top_k, 1)
        cached = np.repeat(self.hit[:, :, None] * (right > 0)[:, None, None], self.top_k, 2)
        return replace(self, chosen=chosen, cached=cached)


def curves_of(counts: npt.NDArray[Any], top_k: int) -> Curves:
    """What uses [L, E] alone tell: the hit rate of the C most used experts, and no predictions."""
    hit = hit_curves(counts)
    layers, sizes = hit.shape
    tokens = int(counts.sum()) // max(1, layers * top_k)
    return Curves(top_k, tokens, hit, np.zeros((layers, 0)), np.zeros((layers, sizes, 0)))
