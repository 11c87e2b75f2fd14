"""Predictors that go by token ids, and the one that knows what comes."""

from typing import Any

import numpy as np
import pytest

from core.policy.predict import Oracle
from core.policy.predict.path_messages import answer, question
from core.policy.predict.path_reader import PathReader, needed
from core.policy.predict.worker import InlineWorker
from core.settings.registry import create
from tests.policy.views import Looking, make, random_passes, shown

LAYERS, EXPERTS, K = 6, 8, 2


class Scripted:
    """A worker that always tells the same, when it is let; what it hears is kept."""

    def __init__(self) -> None:
        self.predicted = np.random.default_rng(3).random((LAYERS, EXPERTS)).astype(np.float32)
        self.heard: list[tuple[int, bool, list[int]]] = []

    def work(self, message: bytes) -> bytes:
        number, shares = question(message)
        self.heard += [(number, share.fresh, list(share.tokens)) for share in shares]
        idle = np.stack([np.log1p(-self.predicted)] * len(shares)).reshape(len(shares), -1)
        active = [needed(np.log1p(-self.predicted), K * len(share.tokens)).ravel() for share in shares]
        return answer(number, [share.request for share in shares], idle, np.stack(active))


class Late(InlineWorker):
    """Hands out its answers from `due` on."""

    due = False

    def take(self) -> list[bytes]:
        return super().take() if self.due else []


def test_the_routing_path_is_asked_once_a_pass_and_names_all_layers_then_the_next_ones_in_order() -> None:
    worker, (first, second, other) = Scripted(), random_passes([(1, 3), (1, 1), (2, 1)], LAYERS, EXPERTS, K)
    predictor = make("routing_path", distance=2)
    predictor.worker = InlineWorker(worker)
    for one in (first, second, other):
        predicted = [
            predictor.begin(Looking(one, -1, EXPERTS)),
            *(predictor.predict(Looking(one, layer, EXPERTS)) for layer in range(LAYERS)),
        ]
        most = K * one.ids.shape[1]
        for layer, predictions in enumerate(predicted, -1):
            ahead = [at for at in ((layer + 1, layer + 2) if layer >= 0 else range(LAYERS)) if at < LAYERS]
            assert [g.layer for g in predictions] == [at for at in ahead for _ in range(most)]
            assert [g.expert for g in predictions] == [
                e for at in ahead for e in np.argsort(-worker.predicted[at])[:most].tolist()
            ]
            assert [g.score for g in predictions] == pytest.approx(
                [worker.predicted[g.layer][g.expert] for g in predictions]
            )
    tokens = [list(Looking(one, 0, EXPERTS).tokens) for one in (first, second, other)]
    assert worker.heard == [(1, True, tokens[0]), (2, False, tokens[1]), (3, True, tokens[2])]  # another request
    predictor.close()  # starts anew


def test_a_routing_path_that_is_late_is_used_from_the_layer_that_is_reached_then() -> None:
    one, after = random_passes([(1, 1), (1, 1)], LAYERS, EXPERTS, K)
    predictor: Any = create("predictor", "routing_path", {"distance": 2})
    predictor.worker = late = Late(Scripted())
    assert predictor.begin(Looking(one, -1, EXPERTS)) == []
    assert predictor.predict(Looking(one, 0, EXPERTS)) == []
    late.due = True
    assert {g.layer for g in predictor.predict(Looking(one, 1, EXPERTS))} == {2, 3, 4, 5}
    assert {g.layer for g in predictor.predict(Looking(one, 2, EXPERTS))} == {3, 4}
    late.due = False
    assert predictor.begin(Looking(after, -1, EXPERTS)) == []  # what was told of one pass is not said of the next
    predictor.close()


def test_a_pass_that_was_announced_is_not_asked_again_and_another_one_starts_anew() -> None:
    worker, (first, second, third) = Scripted(), random_passes([(1, 3), (1, 1), (1, 1)], LAYERS, EXPERTS, K)
    predictor: Any = create("predictor", "routing_path", {})
    predictor.worker = InlineWorker(worker)
    predictor.announce(Looking(first, -1, EXPERTS))
    assert predictor.begin(Looking(first, -1, EXPERTS))
    predictor.announce(Looking(second, -1, EXPERTS))  # while the first runs
    named = {g.layer for g in predictor.predict(Looking(first, 0, EXPERTS))}
    assert named == {1, 2, 3, 4} and [number for number, *_ in worker.heard] == [1, 2]
    assert predictor.begin(Looking(third, -1, EXPERTS))  # the second never came
    assert [(number, fresh) for number, fresh, _ in worker.heard] == [(1, True), (2, False), (3, True)]
    assert worker.heard[-1][2] == list(Looking(third, 0, EXPERTS).tokens)
    predictor.close()


def test_without_a_process_the_network_is_worked_at_once() -> None:
    """Tokens 50 and above are one to the network; what it says of others is another thing."""
    passes = random_passes([(1, 3), (1, 1)], LAYERS, EXPERTS, K)
    named = [
        predictions for _, layer, predictions in shown(make("routing_path", distance=1), passes, EXPERTS) if layer == 0
    ]
    task = make("routing_path").task(Looking(passes[0], -1, EXPERTS))
    assert task is not None
    reader = PathReader(task)
    for one, predictions in zip(passes, named, strict=True):
        chances = reader.follow(list(Looking(one, 0, EXPERTS).tokens))
        assert {g.expert: g.score for g in predictions} == {
            e: chances[1, e] for e in np.argsort(-chances[1])[: K * one.ids.shape[1]].tolist()
        }


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("distance", [1, 2, 9])
def test_the_oracle_names_exactly_what_comes(distance: int, begins: bool) -> None:
    passes = random_passes([(1, 3), (1, 1), (2, 1)], LAYERS, EXPERTS, K)
    oracle = Oracle((one.ids.swapaxes(0, 1) for one in passes), distance)
    future = [
        (at, layer, set(one.ids[layer].ravel().tolist())) for at, one in enumerate(passes) for layer in range(LAYERS)
    ]
    for at, one in enumerate(passes):
        for layer in range(-1 if begins else 0, LAYERS):
            view = Looking(one, layer, EXPERTS)
            predicted = oracle.begin(view) if layer < 0 else oracle.predict(view)
            ahead = future[at * LAYERS + layer + 1 :][: min(distance, LAYERS)]
            assert [(g.layer, g.expert) for g in predicted] == [(of, e) for _, of, ids in ahead for e in sorted(ids)]
            assert all(g.score == 1.0 for g in predicted)
