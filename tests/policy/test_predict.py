"""Predictors that ask routers: what they name, by hand."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from core.policy.predict import Prediction
from core.policy.predict.base import State, union
from core.policy.predict.ranking import Again
from tests.policy.views import Known, Looking, Pass, make


class Fixed(Looking):
    """One token of the first request at `layer`; routers of 4 experts, top-2, by given chances [4] per layer."""

    def __init__(
        self,
        layer: int,
        ids: Sequence[int],
        chances: dict[int, list[float]],
        known: Known | None = None,
        layers: int = 3,
    ) -> None:
        super().__init__(Pass(1, np.array([[ids]] * layers)), layer, 4, True, known)
        self._chances = chances
        self.asked: list[tuple[int, str]] = []

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        self.asked += [(of, state) for of in layers]
        return np.array([self._chances[of] for of in layers])

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        self.asked.append((layer, "estimate"))
        return np.array(self._chances[layer])


def named(predictions: Sequence[Prediction]) -> list[tuple[int, int]]:
    return [(g.layer, g.expert) for g in predictions]


def test_the_likeliest_experts_of_the_next_layer_best_first() -> None:
    predictions = make("gate").predict(Fixed(0, [3, 1], {1: [0.1, 0.5, 0.1, 0.3]}))
    assert predictions == [(1, 1, 0.5), (1, 3, 0.3)]


def test_width_and_least_probability_bound_what_is_fetched() -> None:
    chances = {1: [0.1, 0.5, 0.1, 0.3]}
    assert len(make("gate", width=3).predict(Fixed(0, [3, 1], chances))) == 3
    assert named(make("gate", width=3, floor=0.4).predict(Fixed(0, [3, 1], chances))) == [(1, 1)]


def test_the_gate_asks_the_next_layers_nearest_first_up_to_the_last() -> None:
    chances = {1: [0.1, 0.5, 0.1, 0.3], 2: [0.9, 0.5, 0.1, 0.3]}
    gate, view = make("gate", distance=3), Fixed(0, [3, 1], chances)
    assert named(gate.predict(view)) == [(1, 1), (1, 3), (2, 0), (2, 1)]
    assert named(gate.predict(Fixed(1, [3, 1], chances))) == [(2, 0), (2, 1)]


def test_the_last_layer_names_what_layer_0_used_for_this_token() -> None:
    predictor = make("gate")
    predictor.predict(Fixed(0, [3, 1], {1: [0.25] * 4}))
    assert named(predictor.predict(Fixed(2, [0, 2], {}))) == [(0, 3), (0, 1)]


def test_a_stride_asks_one_router_and_remembers_the_first_layers() -> None:
    predictor = make("stride", distance=2)
    first = Fixed(0, [3, 1], {2: [0.1, 0.5, 0.2, 0.3]}, layers=4)
    assert named(predictor.predict(first)) == [(2, 1), (2, 3)]
    assert first.asked == [(2, "hidden")]
    assert named(predictor.predict(Fixed(1, [0, 2], {3: [0.1, 0.5, 0.6, 0.3]}, layers=4))) == [(3, 2), (3, 1)]
    assert named(predictor.predict(Fixed(2, [1, 2], {}, layers=4))) == [(0, 3), (0, 1)]
    assert named(predictor.predict(Fixed(3, [1, 2], {}, layers=4))) == [(1, 0), (1, 2)]


def test_default_vectors_ask_the_next_router_on_the_quasi_hidden_state() -> None:
    view = Fixed(0, [3, 1], {1: [0.1, 0.5, 0.1, 0.3]})
    assert named(make("default_vectors").predict(view)) == [(1, 1), (1, 3)]
    assert view.asked == [(1, "default")]


@pytest.mark.parametrize(
    ("gate", "default", "else_"),
    [((0.79, 0.8), None, "hidden"), ((0.9, 0.7), (0.79, 0.8), "default"), ((0.7, 0.7), (0.79, 0.8), "default")],
)
def test_the_network_is_asked_only_where_the_router_that_would_be_asked_guesses_badly(
    gate: tuple[float, ...], default: tuple[float, ...] | None, else_: str
) -> None:
    """Its recall on the state that it is given: a profile may have default vectors, and not what they are worth."""
    known = Known(gate_recall=np.array([np.nan, *gate]), defaults=np.zeros((3, 4, 2)))
    known.default_recall = None if default is None else np.array([np.nan, *default])
    predictor, chances = make("hybrid", threshold=0.8), {1: [0.4, 0.3, 0.2, 0.1], 2: [0.1, 0.2, 0.3, 0.4]}
    views = [Fixed(layer, [3, 1], chances, known) for layer in range(3)]
    assert named(predictor.predict(views[0])) == [(1, 0), (1, 1)]
    assert named(predictor.predict(views[1])) == [(2, 3), (2, 2)]
    assert named(predictor.predict(views[2])) == [(0, 3), (0, 1)]
    assert [view.asked for view in views] == [[(1, "estimate")], [(2, else_)], []]
    always = Fixed(1, [3, 1], chances, known)
    make("estimator").predict(always)
    assert always.asked == [(2, "estimate")]


def test_the_chance_that_some_token_asks_by_hand() -> None:
    # Two draws by p = .5 both miss with .25; a second token with p = .1 misses with .81: 1 - .25 * .81.
    one, two = np.log1p(-np.array([0.5, 0.0])), np.log1p(-np.array([0.1, 0.0]))
    assert union(one, 2) == pytest.approx([0.75, 0.0])
    assert union(one + two, 2) == pytest.approx([1 - 0.25 * 0.81, 0.0])
    assert union(np.array([-np.inf]), 2) == pytest.approx([1.0])


def test_how_often_a_guess_came_true_by_hand() -> None:
    again = Again()
    assert (again.score(0), again.predictions(0, 2)) == (0.5, [])
    again.note(0, [[3, 1], [2, 0]])
    assert again.predictions(0, 1) == [(0, 2, 0.5)]
    again.note(0, [[2, 1]])  # of 2 and 0 came 2: (1 + 1) / (2 + 2)
    again.note(0, [[2, 1]])  # and then both: (3 + 1) / (4 + 2)
    assert again.predictions(0, 2) == [(0, 2, 4 / 6), (0, 1, 4 / 6)]
    assert again.score(1) == 0.5


def test_a_layer_that_needs_no_prediction_is_counted_as_others_by_hand() -> None:
    called, passed = make("gate"), make("gate")
    for ids in ([3, 1], [3, 2]):
        called.predict(Fixed(0, ids, {1: [0.1, 0.2, 0.3, 0.4]}))
        passed.passed(0, ids)
        passed.passed(1, [0, 1])
    last = Fixed(2, [0, 1], {})
    assert called.predict(last) == passed.predict(last) == [(0, 3, 0.5), (0, 2, 0.5)]  # 3 came again: (1 + 1) / (2 + 2)
