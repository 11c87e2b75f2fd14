"""bench predictors: its arithmetic by hand, and the whole of it on the demo model with a drawn profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench import predictors
from bench.predictor_probe import PredictorProbe
from bench.skeleton import TINY, measure
from core.policy.predict import Prediction, Predictor, View
from core.settings.registry import variants
from tests.engine.profiles import drawn_profile
from tests.policy.views import Looking, Pass


class Script(Predictor):
    """Names what it was told to, call by call."""

    starts = True

    def __init__(self, *calls: Sequence[Prediction]) -> None:
        self._calls = iter(calls)

    def begin(self, view: View) -> Sequence[Prediction]:
        return next(self._calls)

    def predict(self, view: View) -> Sequence[Prediction]:
        return next(self._calls)


def test_recall_goes_by_the_last_word_on_each_layer_by_hand() -> None:
    probe = PredictorProbe(
        Script(
            [Prediction(0, 1, 0.9), Prediction(1, 7, 0.5)],  # before the first pass
            [Prediction(1, 2, 0.2), Prediction(1, 4, 0.1), Prediction(1, 3, 0.3)],
            [Prediction(0, 5, 0.5)],
            [],
            [Prediction(1, 1, 1.0)],
            [Prediction(0, 0, 1.0)],
        ),
        patient=True,
    )  # and the second
    for one in (Pass(1, np.array([[[0, 1]], [[2, 3]]])), Pass(1, np.array([[[5, 6]], [[0, 1]]]))):
        probe.begin(Looking(one, -1, 8))
        for layer in range(2):
            probe.predict(Looking(one, layer, 8))
    # Layer 0: 1 of 0 1, then 5 of 5 6. Layer 1: of 3 2 4 both of 2 3 (7 was overtaken), then 1 of 0 1.
    assert probe.recall(2) == [0.5, 0.75]
    assert probe.recall(2, width=1) == [0.5, 0.5]
    assert probe.named() == (1 + 3 + 1 + 1) / 4
    assert all(ms > 0 for ms in probe.ms_per_token().values())


class Weighted(Looking):
    """The last chosen expert weighs most."""

    @property
    def weights(self) -> Sequence[Sequence[float]]:
        return [[float(at) for at in range(self.top_k)] for _ in self.ids]


def test_recall_by_rank_goes_by_weight_not_by_the_routers_order() -> None:
    one = Pass(1, np.array([[[0, 1]], [[2, 3]]]))

    def heard(patient: bool) -> PredictorProbe:
        probe = PredictorProbe(
            Script([Prediction(0, 1, 0.9)], [Prediction(1, 7, 0.3), Prediction(1, 3, 0.2), Prediction(1, 2, 0.1)], []),
            patient,
        )
        probe.begin(Looking(one, -1, 8))
        for layer in range(2):
            probe.predict(Weighted(one, layer, 8))
        return probe

    # Heaviest first 1 0 and 3 2. Layer 0: 1 was named. Layer 1: 3 is among the two likeliest of 7 3 2.
    assert heard(True).recall_by_rank(2, 2) == [[1.0, 0.0], [1.0, 0.0]]
    assert heard(True).recall_by_rank(2, 1) == [[1.0, 0.0], [0.0, 0.0]]
    assert heard(False).recall_by_rank(2, 2) == [[], []], "weights are not read while times are measured"


def test_passes_of_many_tokens_are_not_counted() -> None:
    probe = PredictorProbe(Script([], [], []), patient=False)
    one = Pass(1, np.array([[[0, 1], [2, 3]], [[2, 3], [0, 1]]]))
    probe.begin(Looking(one, -1, 8))
    for layer in range(2):
        probe.predict(Looking(one, layer, 8))
    assert probe.recall(2) == [0.0, 0.0] and probe.named() == 0.0
    assert probe.ms_per_token() == {"wall": 0.0, "cpu": 0.0}


@pytest.mark.long(0.2)
def test_the_cost_in_a_large_model_is_measured_for_every_predictor() -> None:
    found = measure(TINY, predictors.subjects(), 2, lambda text: None)
    assert found.keys() == predictors.subjects().keys() >= {v.name for v in variants("predictor")} - {"none"}
    assert all(one["wall"] >= one["cpu"] * 0.5 > 0 for one in found.values())


@pytest.mark.long(0.2)
def test_all_of_it_on_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(engine: Any, texts: Sequence[Any], limit: int) -> Any:
        assert len(texts) > predictors.HELD_OUT
        return drawn_profile(engine)

    some = {n: s for n, s in predictors.subjects().items() if n in ("all_next", "gate", "routing_path", "expert_map")}
    monkeypatch.setattr(predictors, "calibrate", drawn)
    monkeypatch.setattr(predictors, "subjects", lambda: some)
    result: Any = json.loads(json.dumps(predictors.run(small=True, say=lambda text: None)))
    found, layers = result["predictors"], result["layers"]
    assert found.keys() == result["large"].keys() == predictors.subjects().keys()
    for one in found.values():
        assert len(one["recall_by_layer"]) == layers
        ranks = one["recall_by_rank"]
        assert [sum(rates) / result["top_k"] for rates in ranks] == pytest.approx(one["recall_by_layer"])
        assert 0 <= one["recall_at_k"] <= one["recall_of_all_named"] <= 1
    assert found["all_next"]["recall_of_all_named"] > 0.9 and found["all_next"]["named"] > result["top_k"]
    assert found["gate"]["recall_at_k"] > found["routing_path"]["recall_at_k"]  # which was never trained
    text = predictors.table(result)
    assert all(name in text for name in found)


@pytest.mark.parametrize(("count", "asked"), [(400, 64), (61, 15), (9, 2)])
def test_what_is_asked_is_in_no_profile(count: int, asked: int) -> None:
    texts: list[Any] = [str(at) for at in range(count)]
    known, held_out = predictors.divided(texts)
    assert len(held_out) == asked and not {*known} & {*held_out}
    assert len(known) >= count * 0.74 and int(held_out[-1]) - int(held_out[0]) >= count // 3
