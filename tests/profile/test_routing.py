"""What profiling takes from routing: counts, maps, likeness, samples, by hand."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.engine.texts import tokenize
from core.measure.calibrate import likeness
from core.measure.calibrate import paths as module
from core.measure.calibrate.gather import calibrate
from core.measure.calibrate.maps import MapCollection
from core.measure.calibrate.paths import Paths
from core.memory.store import Cancelled
from core.policy.substitute.entropy import entropy
from core.profile.routing import Activations, Entropies
from core.profile.summary import best_pairs
from tests.profile.conftest import MakeEngine


def test_activations_one_token_at_a_time() -> None:
    rng = np.random.default_rng(0)
    ids = rng.random((200, 16)).argsort(-1)[:, :4]
    ids[7, 3] = ids[7, 1]  # a token that has an expert twice uses it once
    weights = rng.random((200, 4)).astype(np.float32)
    found, wide = Activations(2, 16), np.zeros((16, 16))
    counts, both = np.zeros(16, int), np.zeros((16, 16))
    for part in np.array_split(np.arange(200), 7):
        found.add(1, ids[part].astype(np.uint8), weights[part])
    for row, w in zip(ids.tolist(), weights.astype(float), strict=True):
        gates = {}
        for expert, weight in zip(row, w, strict=True):
            gates.setdefault(expert, weight)
        for i, gi in gates.items():
            counts[i] += 1
            for j, gj in gates.items():
                both[i, j] += i != j
                wide[i, j] += (i != j) * min(gi, gj) / sum(gates.values())
    assert found.counts.tolist() == [[0] * 16, counts.tolist()]
    np.testing.assert_array_equal(found.pairs(), [0 * both, both])
    np.testing.assert_allclose(found.pairs_weighted(), [0 * wide, wide], rtol=1e-5)


def test_first_tokens_count_less_in_pairs_only() -> None:
    found = Activations(1, 3)
    found.add(0, np.array([[0, 1], [0, 2]]), np.array([[0.5, 0.5]] * 2), np.array([0.25, 1.0]))
    assert found.counts[0].tolist() == [2, 1, 1]
    weighted = found.pairs_weighted()
    assert found.pairs()[0, 0].tolist() == [0, 0.25, 1] and weighted[0, 0].tolist() == [0, 0.125, 0.5]


def test_without_weights_nothing_is_said_of_them() -> None:
    found = Activations(1, 4)
    found.add(0, np.array([[0, 1]]))
    assert found.pairs_weighted() is None and found.pairs()[0, 0, 1] == 1


def test_entropy_by_hand() -> None:
    """-sum g log g / log k: all equal 1, one alone 0, and .75/.25 gives .8113 of a bit."""
    weights = np.array([[0.5, 0.5], [1.0, 0.0], [0.3, 0.1], [0.9, 0.3]])
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    np.testing.assert_allclose(entropy(weights), [1, 0, bits, bits])
    assert bits == pytest.approx(0.8112781)
    assert entropy(np.ones((3, 1))).tolist() == [0, 0, 0]  # of one expert there is nothing to choose


def test_percentiles_are_those_of_the_sorted_values() -> None:
    rng = np.random.default_rng(1)
    weights = rng.dirichlet([0.6] * 4, (2, 777))
    found = Entropies(2)
    assert found.percentiles() is None
    for part in np.array_split(np.arange(777), 5):
        for layer in range(2):
            found.add(layer, weights[layer, part])
    got = found.percentiles()
    assert got is not None and got.shape == (2, 101) and got.dtype == np.float32
    for layer in range(2):
        exact = np.percentile(entropy(weights[layer]), np.arange(101), method="inverted_cdf")
        np.testing.assert_allclose(got[layer], exact, atol=1 / (1 << 14))


@pytest.mark.parametrize("distance", [1, 3, 99])
def test_many_at_once_are_one_after_another(distance: int) -> None:
    rng = np.random.default_rng(distance)
    layers, experts, hidden, capacity, n = 4, 6, 5, 20, 130
    keys = rng.standard_normal((n, hidden)).astype(np.float32)
    maps = rng.dirichlet([0.3] * experts, (n, layers)).astype(np.float32)
    store = MapCollection(layers, experts, hidden, capacity, distance)
    for part in np.array_split(np.arange(n), [3, 20, 22, 90, 91]):
        store.add(keys[part], maps[part])

    share, kept = min(distance, layers) / layers, list(range(capacity))
    for new in range(capacity, n):

        def cos(a: np.ndarray, b: np.ndarray) -> float:
            return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))

        redundancy = [share * cos(keys[new], keys[old]) + (1 - share) * cos(maps[new], maps[old]) for old in kept]
        kept[int(np.argmax(redundancy))] = new
    np.testing.assert_array_equal(store.keys(), keys[kept].astype(np.float16))
    np.testing.assert_array_equal(store.maps(), maps[kept].astype(np.float16))


def test_a_store_that_is_not_full_has_what_there_was() -> None:
    store = MapCollection(2, 3, 4)
    store.add(np.ones((3, 4), np.float32), np.ones((3, 2, 3), np.float32))
    assert store.maps().shape == (3, 2, 3) and store.keys().shape == (3, 4)


TEXTS = ["Nothing is fetched that is there already.", "Bread, pane, pain, Brot."]


def measured(engine: Engine, texts: list[str]) -> np.ndarray:
    found = calibrate(engine, texts, parts={"likeness"}).likeness
    assert found is not None
    return found


def test_a_sample_of_what_was_read_is_enough(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(engine, TEXTS)
    monkeypatch.setattr(likeness, "TOKENS", 16)
    some = measured(engine, TEXTS)
    assert np.array_equal(some, measured(engine, TEXTS)) and not np.array_equal(some, whole)  # the same 16 again
    assert np.abs(some.astype(float) - whole).max() < 0.3


def test_it_does_not_depend_on_how_many_fit_at_once(engine: Engine) -> None:
    """68 pairs a pass: one expert after another for 65 tokens; and then all at once."""
    with engine.workbench("test") as bench:
        kept = likeness.Likeness(bench.shape.layers, bench.shape.experts, bench.shape.hidden)
        with bench.watched(kept.add, lambda embedded: None):
            for text in TEXTS:
                ids = tokenize(engine.prompt.tokenizer, text).ids.tolist()
                kept.begin(len(ids))
                bench.run(ids, bench.kv.fresh())
        found = []
        for bench.chunk in (17, 512):
            found.append(kept.measure(bench, lambda text, share: None, threading.Event()))
    assert found[0] is not None and found[1] is not None
    np.testing.assert_allclose(found[0], found[1], atol=1e-3)
    np.testing.assert_allclose(found[1], measured(engine, TEXTS), atol=1e-3)


def test_one_token_is_enough_and_none_is_not(engine: Engine) -> None:
    one = measured(engine, ["a"])
    assert one[:, range(8), range(8)].min() == 1 and np.isfinite(one).all()
    np.testing.assert_array_equal(one, one.transpose(0, 2, 1))
    with engine.workbench("test") as bench:
        kept = likeness.Likeness(3, 8, 64)
        assert kept.measure(bench, lambda text, share: None, threading.Event()) is None


def test_it_can_be_cancelled(engine: Engine) -> None:
    cancel = threading.Event()

    def progress(text: str, share: float) -> None:
        if text.startswith("Measuring how alike"):
            cancel.set()

    with pytest.raises(Cancelled):
        calibrate(engine, TEXTS, parts={"likeness"}, progress=progress, cancel=cancel)


def test_experts_in_a_shared_pool_with_few_slots(make_engine: MakeEngine, engine: Engine) -> None:
    small = make_engine(settings={"scope": "global", "budget": "17%"})
    np.testing.assert_allclose(measured(small, TEXTS), measured(engine, TEXTS), atol=1e-3)


def test_the_most_alike_pair_of_each_layer(engine: Engine) -> None:
    profile = calibrate(engine, TEXTS, parts={"likeness"})
    expected = [max(float(row[i, j]) for i in range(8) for j in range(i)) for row in profile.likeness]
    assert best_pairs(profile).tolist() == expected


L, E = 2, 4


def passage(tokens: int, first: int) -> tuple[Any, Any]:
    return np.arange(first, first + tokens), np.full((tokens, L, 2), first % E)


def test_texts_are_kept_whole_and_bounded() -> None:
    paths = Paths(L, E, 2, tokens=100)
    for i in range(40):
        paths.add(*passage(10, 1000 * i), prompt=4)
    found = paths.passages()
    assert len(found) == 10 and [p.ids[0] for p in found] == sorted(p.ids[0] for p in found)
    for one in found:
        assert list(one.prompt) == list(one.ids)[:4] and one.routes.shape == (10, L, 2)
        assert one.routes.dtype == torch.uint8
    assert [p.ids[0] for p in found] != [1000 * i for i in range(10)]  # not merely the first ones
    lone = Paths(L, E, 2, tokens=5)
    lone.add(*passage(50, 0), prompt=1)
    assert len(lone.passages()) == 1  # never less than one


def test_each_text_has_the_same_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = np.zeros(12)
    for seed in range(600):
        monkeypatch.setattr(module, "SEED", seed)
        paths = Paths(L, E, 2, tokens=20)
        for i in range(12):
            paths.add(*passage(5, 100 * i), prompt=2)
        for one in paths.passages():
            hits[one.ids[0] // 100] += 1
        paths.close()
    assert hits.sum() == 600 * 4 and (abs(hits - 200) < 5 * np.sqrt(200 * 2 / 3)).all()
