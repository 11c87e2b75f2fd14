"""Predictors that go by token ids, and the one that knows what comes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from core.policy.predict import Oracle
from core.policy.predict.aside import Aside
from core.policy.predict.base import PathNet
from core.registry import create, variants
from tests.policy.views import FakePath, Known, Looking, Pass, make, random_passes, shown

LAYERS, EXPERTS, K = 6, 8, 2


class Walked(Looking):
    """With a routing-path network of the test's own."""

    net: PathNet

    def path(self) -> FakePath:
        return self.net  # type: ignore[return-value]


def walked(net: PathNet, one: Pass, layer: int) -> Walked:
    view = Walked(one, layer, EXPERTS)
    view.net = net
    return view


# ---------------------------------------------------------------------- routing path

def test_the_routing_path_is_asked_once_a_pass_and_names_the_next_layers_in_order() -> None:
    net, (first, second, other) = FakePath(LAYERS, EXPERTS), random_passes([(1, 3), (1, 1), (2, 1)], LAYERS, EXPERTS, K)
    predictor = make("routing_path", distance=2)
    for one in (first, second, other):
        told = [predictor.begin(walked(net, one, -1)),
                *(predictor.predict(walked(net, one, layer)) for layer in range(LAYERS))]
        most = K * one.ids.shape[1]
        for layer, guesses in enumerate(told, -1):
            ahead = [at for at in (layer + 1, layer + 2) if at < LAYERS]
            assert [g.layer for g in guesses] == [at for at in ahead for _ in range(most)]
            assert [g.expert for g in guesses] == [e for at in ahead for e in np.argsort(-net.told[at])[:most].tolist()]
            assert [g.score for g in guesses] == [net.told[g.layer][g.expert] for g in guesses]
    tokens = [tuple(Looking(one, 0, EXPERTS).tokens) for one in (first, second, other)]
    assert net.heard == [None, tokens[0], tokens[1], None, tokens[2]]    # another request starts anew
    predictor.close()


def test_a_routing_path_that_is_late_is_used_from_the_layer_that_is_reached_then() -> None:
    gate, asked = threading.Event(), threading.Event()

    class Slow(FakePath):
        def follow(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
            asked.set()
            assert gate.wait(30)
            return self.told

    net, (one, after) = Slow(LAYERS, EXPERTS), random_passes([(1, 1), (1, 1)], LAYERS, EXPERTS, K)
    predictor = create("predictor", "routing_path", {"distance": 2})
    assert predictor.begin(walked(net, one, -1)) == []
    assert predictor.predict(walked(net, one, 0)) == []
    assert asked.wait(30)
    gate.set()
    predictor._aside.wait()
    predictor._aside._done.append((1, net.told))          # `wait` took it
    assert {g.layer for g in predictor.predict(walked(net, one, 1))} == {2, 3}
    gate.clear()
    assert predictor.begin(walked(net, after, -1)) == []  # what was told of one pass is not said of the next
    gate.set()
    predictor.close()


# ---------------------------------------------------------------------- token table

TABLE = Known(first_table=(np.array([4, 9], np.int32), np.array([[5, 2], [2, -1]], np.int16)))


class Said(Looking):
    """Tokens with given ids, and the experts of layer 0."""

    def __init__(self, tokens: Sequence[int], layer: int, chosen: Sequence[Sequence[int]]) -> None:
        super().__init__(Pass(1, np.array([chosen, chosen])), layer, EXPERTS, True, TABLE)
        self.tokens = tokens


def test_the_table_names_layer_0_before_anything_is_computed_by_hand() -> None:
    predictor = make("token_table")
    one = [[5, 1]]
    assert predictor.begin(Said([4], -1, one)) == [(0, 5, 0.5), (0, 2, 0.5)]
    predictor.predict(Said([4], 0, one))                   # 5 was right: (1 + 1) / (2 + 2)
    assert predictor.begin(Said([4], -1, one)) == [(0, 5, 0.5), (0, 2, 0.5)]
    predictor.predict(Said([4], 0, [[5, 2]]))              # both: (3 + 1) / (4 + 2)
    assert predictor.begin(Said([9], -1, one)) == [(0, 2, pytest.approx(2 / 3))]
    # Two tokens name 2, one of them 5: 1 - (1 / 3)^2 and 2 / 3.
    told = predictor.begin(Said([4, 9, 7], -1, one * 3))
    assert told == [(0, 2, pytest.approx(8 / 9)), (0, 5, pytest.approx(2 / 3))]
    assert predictor.begin(Said([7], -1, one)) == []       # the table does not have it
    assert predictor.begin(Said([100], -1, one)) == []


def test_with_the_table_the_other_layers_are_asked_as_by_the_gate() -> None:
    passes = random_passes([(1, 3), (1, 1)], LAYERS, EXPERTS, K)
    table = [g for _, layer, told in shown(make("token_table", distance=2), passes, EXPERTS, TABLE) if layer >= 0
             for g in told]
    gate = [g for _, layer, told in shown(make("gate", distance=2), passes, EXPERTS) if layer < LAYERS - 1
            for g in told]
    assert table == gate


# ---------------------------------------------------------------------- oracle

@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("distance", [1, 2, 9])
def test_the_oracle_names_exactly_what_comes(distance: int, begins: bool) -> None:
    passes = random_passes([(1, 3), (1, 1), (2, 1)], LAYERS, EXPERTS, K)
    oracle = Oracle((one.ids.swapaxes(0, 1) for one in passes), distance)
    future = [(at, layer, set(one.ids[layer].ravel().tolist())) for at, one in enumerate(passes)
              for layer in range(LAYERS)]
    for at, one in enumerate(passes):
        for layer in range(-1 if begins else 0, LAYERS):
            view = Looking(one, layer, EXPERTS)
            told = oracle.begin(view) if layer < 0 else oracle.predict(view)
            ahead = future[at * LAYERS + layer + 1 :][: min(distance, LAYERS)]
            assert [(g.layer, g.expert) for g in told] == [(of, e) for _, of, ids in ahead for e in sorted(ids)]
            assert all(g.score == 1.0 for g in told)


def test_the_oracle_cannot_be_chosen() -> None:
    assert "oracle" not in [v.name for v in variants("predictor")]


# ---------------------------------------------------------------------- the thread beside

def test_results_are_taken_in_order_when_they_are_there() -> None:
    beside, gate = Aside[int]("test"), threading.Event()

    def slow() -> int:
        assert gate.wait(30)
        return 1

    beside.do(slow)
    beside.do(lambda: 2)
    assert beside.take() == []
    gate.set()
    assert beside.wait() == [1, 2]
    assert beside.take() == []
    beside.close()
    beside.do(lambda: 3)                                   # nobody is there to do it
    assert beside.wait() == []


def test_closing_drops_what_has_not_started() -> None:
    beside, started, gate, done = Aside[None]("test"), threading.Event(), threading.Event(), list[int]()

    class Jobs(Queue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            if item is None:                               # it is being closed
                gate.set()

    def slow() -> None:
        started.set()
        assert gate.wait(30)

    beside._jobs = Jobs()  # type: ignore[assignment]
    beside.do(slow)
    for i in range(3):
        beside.do(lambda i=i: done.append(i))  # type: ignore[misc]
    assert started.wait(30)
    beside.close()
    assert done == []
