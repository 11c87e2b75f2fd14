"""The suites of routing: their arithmetic by hand and by a second way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.harness.engines import divided
from bench.routing import estimator, map_figures, methods, overhead
from bench.routing.map_figures import Iteration
from bench.routing.probe import PredictorProbe
from core.policy.predict import Prediction, Predictor, View
from core.policy.predict.map_search import MapSearch, followed, opened, read
from core.policy.predict.worker import WorkerTask
from core.settings.calibration import CalibrationSettings
from core.simulate import Clock
from tests.policy.views import Looking, Pass


class Script(Predictor):
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


@pytest.mark.parametrize(("count", "asked"), [(400, 64), (61, 15), (9, 2)])
def test_held_out_texts_are_in_no_profile(count: int, asked: int) -> None:
    texts: list[Any] = [str(at) for at in range(count)]
    known, held_out = divided(texts)
    assert len(held_out) == asked and not {*known} & {*held_out}
    assert len(known) >= count * 0.74 and int(held_out[-1]) - int(held_out[0]) >= count // 3


def test_a_miss_costs_the_replay_what_it_costs_the_engine() -> None:
    clock = Clock(compute_ms=5.0, load_ms=0.5, expert_ms=0.1)
    lived = {"busy_ms": 8.0, "misses": 6.0}
    assert methods.with_misses(clock, lived) == replace(clock, miss_ms=0.5)
    assert methods.with_misses(clock, {"busy_ms": 4.0, "misses": 6.0}).miss_ms == 0.0, "never less than nothing"
    assert methods.with_misses(clock, {"busy_ms": 8.0, "misses": 0.0}).miss_ms == 0.0


LAYERS, EXPERTS, K, HIDDEN = 5, 8, 2, 6


def drawn(count: int, seed: int = 0, request: int = 0) -> list[Iteration]:
    rng = np.random.default_rng(seed)
    keys, kinds = rng.standard_normal((4, HIDDEN)), rng.dirichlet(np.full(EXPERTS, 0.3), (4, LAYERS))
    found = []
    for kind in rng.integers(4, size=count):
        one = (0.8 * kinds[kind] + 0.2 * rng.dirichlet(np.ones(EXPERTS), LAYERS)).astype(np.float32)
        key = (keys[kind] + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)
        found.append(Iteration(request, key, one, np.argsort(-one, 1)[:, :K]))
    return found


def chosen(*experts: int) -> Iteration:
    one = np.full((1, 4), 0.1, np.float32)
    one[0, list(experts)] = 0.4
    return Iteration(0, np.ones(2, np.float32), one, np.array([experts]))


def test_entropies_by_hand() -> None:
    # Two tokens of two experts each: 1 bit each, 2 bits together, as all four are used alike.
    found = map_figures.entropies([chosen(0, 1), chosen(2, 3)])
    assert found["activations"]["fine"] == pytest.approx(1.0)
    assert found["activations"]["coarse"] == pytest.approx(2.0)
    assert found["activations"]["together"] == pytest.approx({"1": 1.0, "2": 2.0})
    fine = -(0.8 * np.log2(0.4) + 0.2 * np.log2(0.1))
    assert found["probabilities"]["fine"] == pytest.approx(fine) and found["probabilities"]["coarse"] == pytest.approx(
        2
    )
    assert (found["answers"], found["most"]) == (1, 2.0)


def test_coarse_is_of_each_answer_and_not_of_all() -> None:
    found = map_figures.entropies([chosen(0, 1), chosen(2, 3)._replace(request=1)])
    assert found["activations"]["coarse"] == found["activations"]["fine"] == pytest.approx(1.0)
    assert found["answers"] == 2 and found["activations"]["together"] == pytest.approx({"1": 1.0})


def test_correlations_are_those_of_every_pair() -> None:
    maps = drawn(12)
    found = map_figures.correlations(maps)
    pairs = [(a, b) for i, a in enumerate(maps) for b in maps[i + 1 :]]

    def cosine(a: Any, b: Any) -> float:
        return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))

    def common(a: Iteration, b: Iteration, layer: int) -> float:
        return len({*a.chosen[layer].tolist()} & {*b.chosen[layer].tolist()}) / K

    hits = [np.mean([common(a, b, layer) for layer in range(LAYERS)]) for a, b in pairs]
    for name, scores in (
        ("semantic", [cosine(a.key, b.key) for a, b in pairs]),
        ("trajectory", [cosine(a.map, b.map) for a, b in pairs]),
    ):
        assert found[name]["pearson"] == pytest.approx(np.corrcoef(scores, hits)[0, 1], abs=1e-5)
        assert found[name]["pairs"] == len(pairs)
        for tenth, share in enumerate(found[name]["bins"]):
            inside = [h for s, h in zip(scores, hits, strict=True) if min(9, max(0, int(s * 10))) == tenth]
            assert share == (pytest.approx(np.mean(inside)) if inside else None)
    ahead = [
        (cosine(a.map[: layer + 1], b.map[: layer + 1]), common(a, b, layer + 3))
        for layer in range(2)
        for a, b in pairs
    ]
    assert found["ahead"]["pearson"] == pytest.approx(np.corrcoef(*zip(*ahead, strict=True))[0, 1], abs=1e-5)
    assert found["semantic"]["pearson"] > 0.3 and found["trajectory"]["pearson"] > 0.3


def test_without_variation_there_is_no_correlation() -> None:
    assert map_figures.pearson(np.ones(3), np.arange(3.0)) is None


@pytest.mark.parametrize("distance", [1, 3, LAYERS])
@pytest.mark.parametrize("capacity", [4, 100])
def test_what_is_found_is_what_the_prefetcher_finds(distance: int, capacity: int) -> None:
    before, maps = drawn(6, seed=1), drawn(30)
    sizes = {"layers": LAYERS, "experts": EXPERTS, "top_k": K, "distance": distance, "capacity": capacity}
    known = {"maps": np.stack([one.map for one in before]), "map_keys": np.stack([one.key for one in before])}
    search = MapSearch(WorkerTask("maps", {**sizes, "semantic": 1, "dynamic": 0, "learn": 1}, known))
    hits = np.zeros((len(maps), LAYERS))
    for number, one in enumerate(maps):
        answers = [search.work(opened(number, 1) + one.key.tobytes())]
        answers += [search.work(followed(number, at) + row.tobytes()) for at, row in enumerate(one.map)]
        for match in (match for answer in answers for match in read(answer)):
            named = [prediction.expert for prediction in match.predictions]
            hits[number, match.layer] = np.isin(one.chosen[match.layer], named).mean()
    found = map_figures.searched(maps, [(one.key, one.map) for one in before], distance, capacity)
    assert found.recall == pytest.approx(hits.mean(0).tolist()) and min(found.recall) > 0
    assert 0 < found.semantic <= 1.0001 and (found.trajectory > 0) == (distance < LAYERS)


def test_request_counts_begin_anew_with_every_answer() -> None:
    same, other = chosen(0, 1), chosen(2, 3)
    assert map_figures.counted([same, same, other]).mean(0) == [pytest.approx(1 / 3)]
    assert map_figures.counted([same, same._replace(request=1)]).tolist() == [[0.0], [0.0]]


def test_estimators_are_of_every_input_and_no_setting_is_tried_twice() -> None:
    found = estimator.cases()
    assert {one["estimator_input"] for one in found} == set(estimator.INPUTS)
    assert all(found.count(one) == 1 and CalibrationSettings.checked(**one) for one in found)


def test_no_answer_of_a_question_is_read() -> None:
    chats: list[Any] = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i % 200}"}]
        for i in range(600)
    ]
    held_out, known = estimator.divided(chats)
    assert len(held_out) == estimator.HELD_OUT and len(known) == 3 * (200 - estimator.HELD_OUT)
    assert not {str(chat[-1]) for chat in held_out} & {str(chat[-1]) for chat in known}
    held_out, known = estimator.divided(["a", "b", "c"])
    assert (held_out, known) == (["a"], ["b", "c"])


def pair(total_ms: float, predict_ms: float, stall_ms: float = 0.0) -> dict[str, float]:
    return {
        "total_ms": total_ms,
        "compute_ms": total_ms - stall_ms,
        "stall_ms": stall_ms,
        "predict_ms": predict_ms,
        "record_ms": 0.0,
    }


def test_what_a_predictor_adds_is_compared_pair_by_pair_by_hand() -> None:
    """The machine grows slower; in each pair the predictor adds 1 ms, half of which the engine counted as its own."""
    with_it = [pair(11.0, 0.5), pair(21.0, 0.5), pair(41.0, 0.5)]
    told = overhead.judged(with_it, [pair(10.0, 0.0), pair(20.0, 0.0), pair(40.0, 0.0)])
    assert (told["total_ms"], told["none_ms"], told["added_ms"], told["predict_ms"]) == (21.0, 20.0, 1.0, 0.5)
    assert told["beyond"] == pytest.approx(0.5 / 20.0)  # of 5 %, 2.5 % and 1.25 % the middle one
    assert told["kept"] and not told["blocks"]


def test_more_than_its_own_time_and_waiting_are_in_the_result() -> None:
    told = overhead.judged([pair(11.0, 0.25, stall_ms=0.125)], [pair(10.0, 0.0)])
    assert told["beyond"] == pytest.approx(0.075)
    assert not told["kept"] and told["blocks"]
