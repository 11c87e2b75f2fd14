"""The next-layer gate names what a router would choose, best first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.policy.predict import Guess, Predictor
from core.registry import create


class Fixed:
    """A view with given router scores [E] per layer."""

    layers, experts, top_k, request = 3, 4, 2, 1

    def __init__(self, layer: int, ids: Sequence[Sequence[int]], scores: dict[int, list[float]]) -> None:
        self.layer, self.ids, self._scores = layer, ids, scores

    def gate(self, layer: int) -> npt.NDArray[np.float32]:
        return np.array(self._scores[layer], np.float32)


def gate(**params: float) -> Predictor:
    predictor: Predictor = create("predictor", "gate", params)
    return predictor


def test_the_likeliest_experts_of_the_next_layer_best_first() -> None:
    guesses = gate().predict(Fixed(0, [[3, 1]], {1: [0.1, 0.5, 0.1, 0.3]}))
    assert [(g.layer, g.expert) for g in guesses] == [(1, 1), (1, 3)]
    assert guesses[0].score > guesses[1].score


def test_width_and_least_probability_bound_what_is_fetched() -> None:
    scores = {1: [0.1, 0.5, 0.1, 0.3]}
    assert len(gate(width=3).predict(Fixed(0, [[3, 1]], scores))) == 3
    assert [g.expert for g in gate(width=3, floor=0.4).predict(Fixed(0, [[3, 1]], scores))] == [1]


def test_the_last_layer_names_what_layer_0_used_for_this_token() -> None:
    predictor = gate()
    predictor.predict(Fixed(0, [[3, 1]], {1: [0.25] * 4}))
    guesses = predictor.predict(Fixed(2, [[0, 2]], {}))
    assert [(g.layer, g.expert) for g in guesses] == [(0, 3), (0, 1)]


def test_none_is_silent() -> None:
    predictor: Predictor = create("predictor", "none", {})
    assert not predictor.looks and not predictor.asks
    assert list[Guess](predictor.predict(Fixed(0, [[0, 1]], {}))) == []
