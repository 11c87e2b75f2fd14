"""FineMoE's expert maps: what is searched for when, and what comes of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from core.policy.predict import Prediction
from core.policy.predict.base import Later
from core.policy.predict.map_search import MapSearch
from core.policy.predict.worker import InlineWorker
from core.settings.registry import create
from tests.policy.test_predict_map_store import drawn
from tests.policy.views import Known, Looking, Pass, make

LAYERS, EXPERTS, K = 5, 6, 2


class Slow(InlineWorker):
    """Works on what it was given only when it is told to."""

    def __init__(self, worker: MapSearch) -> None:
        super().__init__(worker)
        self._given: list[bytes] = []

    @property
    def behind(self) -> int:  # type: ignore[override]
        return len(self._given)

    def give(self, message: bytes) -> None:
        self._given.append(message)

    def work(self) -> None:
        for message in self._given:
            super().give(message)
        self._given.clear()


class Told(Looking):
    """A token whose routers say `distributions` [L, E], with an embedding."""

    def __init__(
        self,
        layer: int,
        distributions: npt.NDArray[Any],
        embedding: npt.NDArray[Any],
        known: Known | None = None,
        tokens: int = 1,
    ) -> None:
        ids = np.argsort(-distributions, 1)[:, None, :K].repeat(tokens, 1)
        super().__init__(Pass(1, ids), layer, EXPERTS, True, known)
        self._predicted, self._vector = distributions, embedding

    def distribution(self) -> Later:
        return Later(lambda: self._predicted[self.layer].astype(np.float32))

    def embedding(self) -> Later:
        return Later(lambda: self._vector.astype(np.float32))


class Other(Told):
    """Of other tokens."""

    @property
    def tokens(self) -> Sequence[int]:  # type: ignore[override]
        return [9999]

    @tokens.setter
    def tokens(self, value: Sequence[int]) -> None:
        return


def walk(
    predictor: Any,
    distributions: npt.NDArray[Any],
    embedding: npt.NDArray[Any],
    known: Known | None = None,
    tokens: int = 1,
) -> list[Sequence[Prediction]]:
    return [
        predictor.begin(Told(-1, distributions, embedding, known, tokens)),
        *(predictor.predict(Told(layer, distributions, embedding, known, tokens)) for layer in range(LAYERS)),
    ]


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 9])
def test_every_layer_is_searched_for_once_and_d_layers_ahead(distance: int) -> None:
    keys, maps = drawn(4)
    predictor = make("expert_map", distance=distance)
    predicted = walk(predictor, maps[0], keys[0], Known(maps=maps, map_keys=keys))
    layers = [sorted({g.layer for g in predictions}) for predictions in predicted]
    assert layers[0] == list(range(min(distance, LAYERS)))
    assert layers[1:] == [[layer + distance] if layer + distance < LAYERS else [] for layer in range(LAYERS)]
    predictor.close()


def test_the_first_layers_go_by_embedding_and_the_others_by_the_trajectory() -> None:
    keys, maps = drawn(4)
    predictor = make("expert_map", distance=2, dynamic=False, learn=False)
    # The embedding is that of map 3, the routers say what map 1 says.
    predicted = walk(predictor, maps[1], keys[3], Known(maps=maps, map_keys=keys))
    named = {
        layer: [g.expert for predictions in predicted for g in predictions if g.layer == layer]
        for layer in range(LAYERS)
    }
    for layer in range(LAYERS):
        wanted = np.argsort(-maps[3 if layer < 2 else 1][layer])[:K]
        assert named[layer] == wanted.tolist()
    predictor.close()


def test_trajectory_alone_leaves_the_first_layers_out() -> None:
    keys, maps = drawn(4)
    predictor = make("expert_map", distance=2, semantic=False)
    predicted = walk(predictor, maps[1], keys[3], Known(maps=maps, map_keys=keys))
    assert {g.layer for predictions in predicted for g in predictions} == {2, 3, 4}
    predictor.close()


def test_more_experts_are_named_the_less_alike_the_map_is() -> None:
    keys, maps = drawn(1)
    known = Known(maps=maps, map_keys=keys)
    for embedding, count in ((keys[0], K), (-keys[0], EXPERTS)):
        predictor = make("expert_map", distance=3)
        begun = walk(predictor, maps[0], embedding, known)[0]
        assert [sum(g.layer == layer for g in begun) for layer in range(3)] == [count] * 3
        predictor.close()


def test_guesses_come_likeliest_first_and_score_the_chance_of_being_asked() -> None:
    keys, maps = drawn(1)
    maps[0] = np.tile([0.05, 0.5, 0.3, 0.1, 0.03, 0.02], (LAYERS, 1))
    predictor = make("expert_map", distance=2, dynamic=False)
    begun = walk(predictor, maps[0], keys[0], Known(maps=maps, map_keys=keys))[0]
    assert [(g.layer, g.expert) for g in begun] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [g.score for g in begun[:2]] == pytest.approx([1 - 0.5**2, 1 - 0.7**2])
    predictor.close()


def test_a_pass_of_many_tokens_names_experts_for_all_of_them() -> None:
    keys, maps = drawn(1)
    maps[0] = np.tile([0.05, 0.5, 0.3, 0.1, 0.03, 0.02], (LAYERS, 1))
    predictor = make("expert_map", distance=1, dynamic=False)
    begun = walk(predictor, maps[0], keys[0], Known(maps=maps, map_keys=keys), tokens=2)[0]
    assert [g.expert for g in begun] == [1, 2, 3, 0]
    assert begun[0].score == pytest.approx(1 - 0.5**4)
    predictor.close()


def test_it_learns_from_what_it_sees() -> None:
    keys, maps = drawn(3)
    predictor = make("expert_map", distance=2, dynamic=False)
    assert all(not predictions for predictions in walk(predictor, maps[0], keys[0]))
    for key, one in zip(keys[1:], maps[1:], strict=True):
        walk(predictor, one, key)
    predicted = walk(predictor, maps[1], keys[1])
    for layer in range(LAYERS):
        named = [g.expert for predictions in predicted for g in predictions if g.layer == layer]
        assert named == np.argsort(-maps[1][layer])[:K].tolist()
    predictor.close()


def test_without_learning_only_the_profile_is_searched() -> None:
    keys, maps = drawn(3)
    predictor = make("expert_map", learn=False)
    walk(predictor, maps[0], keys[0])
    assert all(not predictions for predictions in walk(predictor, maps[0], keys[0]))
    predictor.close()


def test_more_maps_in_the_profile_than_there_is_room_for() -> None:
    keys, maps = drawn(40)
    predictor = make("expert_map", capacity=8, distance=1, dynamic=False)
    begun = walk(predictor, maps[39], keys[39], Known(maps=maps, map_keys=keys))[0]
    assert [g.expert for g in begun] == np.argsort(-maps[39][0])[:K].tolist()  # the last is among those kept
    store = predictor.worker._worker.store  # type: ignore[union-attr]
    assert store.capacity == store.count == 8
    predictor.close()


def test_no_layer_waits_for_a_search_and_what_comes_too_late_is_not_used() -> None:
    keys, maps = drawn(2)
    known = Known(maps=maps, map_keys=keys)
    predictor: Any = create("predictor", "expert_map", {"distance": 2})
    predictor.worker = slow = Slow(MapSearch(predictor.task(Told(-1, maps[0], keys[0], known))))
    assert all(not predictions for predictions in walk(predictor, maps[0], keys[0], known))
    slow.work()  # the whole pass has been searched for by now ...
    late = predictor.begin(Told(-1, maps[0], keys[0], known))
    assert not late  # ... and is of no use to the next one
    slow.work()
    assert {g.layer for g in predictor.predict(Told(0, maps[0], keys[0], known))} == {1}  # layer 0 is reached already


def test_an_announced_pass_is_searched_for_while_another_one_runs() -> None:
    """Both are told apart: the one that runs is searched for and learnt to its end."""
    keys, maps = drawn(4)
    known = Known(maps=maps[:2], map_keys=keys[:2])
    predictor: Any = create("predictor", "expert_map", {"distance": 1, "dynamic": False})
    predictor.worker = worker = InlineWorker(MapSearch(predictor.task(Told(-1, maps[0], keys[0], known))))
    given: list[bytes] = []
    give = worker.give
    worker.give = lambda message: (given.append(message), give(message))[1]  # type: ignore[method-assign]
    predictor.begin(Told(-1, maps[3], keys[3], known))
    for layer in range(LAYERS):
        if layer == 2:
            predictor.announce(Told(-1, maps[0], keys[0], known))
        predictions = predictor.predict(Told(layer, maps[3], keys[3], known))
        assert {g.layer for g in predictions} == ({layer + 1} if layer + 1 < LAYERS else set())
    assert worker._worker.store.count == 3  # type: ignore[attr-defined]
    count = len(given)
    begun = predictor.begin(Told(-1, maps[0], keys[0], known))
    assert len(given) == count and [g.expert for g in begun] == np.argsort(-maps[0][0])[:K].tolist()
    assert {g.layer for g in predictor.predict(Told(0, maps[0], keys[0], known))} == {1}


def test_an_announced_pass_that_never_comes_is_not_predicted_by() -> None:
    keys, maps = drawn(2)
    known = Known(maps=maps, map_keys=keys)
    predictor = make("expert_map", distance=1, dynamic=False)
    predictor.announce(Told(-1, maps[0], keys[0], known))
    begun = predictor.begin(Other(-1, maps[1], keys[1], known))
    assert [g.expert for g in begun] == np.argsort(-maps[1][0])[:K].tolist()
    predictor.close()


def test_what_arrives_while_a_layer_is_computed_is_for_later_layers() -> None:
    keys, maps = drawn(2)
    known = Known(maps=maps, map_keys=keys)
    predictor: Any = create("predictor", "expert_map", {"distance": 1})
    predictor.worker = slow = Slow(MapSearch(predictor.task(Told(-1, maps[0], keys[0], known))))
    assert predictor.begin(Told(-1, maps[0], keys[0], known)) == ()
    slow.work()
    assert {g.layer for g in predictor.arrived(-1)} == {0} and predictor.arrived(-1) == ()
    assert predictor.predict(Told(0, maps[0], keys[0], known)) == ()
    slow.work()
    assert {g.layer for g in predictor.arrived(0)} == {1}
    assert predictor.predict(Told(1, maps[0], keys[0], known)) == ()
    slow.work()
    assert not predictor.arrived(2) and [one.layer for one in predictor.take_maps()] == [0, 1, 2]  # 2 is reached
    assert predictor.arrived(3) == ()


def test_a_search_that_falls_behind_leaves_passes_out() -> None:
    keys, maps = drawn(2)
    predictor: Any = create("predictor", "expert_map", {"distance": 2})
    predictor.worker = slow = Slow(MapSearch(predictor.task(Told(-1, maps[0], keys[0]))))
    for _ in range(9):
        walk(predictor, maps[0], keys[0])
    assert slow.behind == (LAYERS + 1) * 2  # two passes, of a message as it begins and one a layer
    slow.work()
    assert slow._worker.store.count == 2
    walk(predictor, maps[1], keys[1])
    slow.work()
    assert slow._worker.store.count == 3


def test_numbers_that_the_device_still_works_out_are_sent_when_they_are_there() -> None:
    keys, maps = drawn(2)
    known, there = Known(maps=maps, map_keys=keys), list[bool]([False])

    class Computing(Told):
        def embedding(self) -> Later:
            return Later(lambda: self._vector.astype(np.float32), lambda: there[0])

    predictor: Any = create("predictor", "expert_map", {"distance": 2})
    assert list(predictor.begin(Computing(-1, maps[0], keys[0], known))) == []
    assert list(predictor.predict(Computing(0, maps[0], keys[0], known))) == []
    there[0] = True
    assert {g.layer for g in predictor.predict(Computing(1, maps[0], keys[0], known))} == {2, 3}  # in their order


def test_a_search_that_fails_is_heard_of() -> None:
    keys, maps = drawn(1)
    predictor = make("expert_map")

    class Broken(Told):
        def embedding(self) -> Later:
            def fail() -> npt.NDArray[np.float32]:
                raise ZeroDivisionError("the copy failed")

            return Later(fail)

    with pytest.raises(ZeroDivisionError, match="the copy failed"):
        predictor.begin(Broken(-1, maps[0], keys[0]))
    predictor.close()
    predictor.close()
