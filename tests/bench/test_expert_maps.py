"""bench expert_maps: its arithmetic by hand and by a second way, and the whole of it on the demo model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench import expert_maps, map_figures
from bench.map_figures import Iteration
from core.policy.predict.map_search import MapSearch, followed, opened, read
from core.policy.predict.worker import WorkerTask

LAYERS, EXPERTS, K, HIDDEN = 5, 8, 2, 6


def drawn(count: int, seed: int = 0, request: int = 0) -> list[Iteration]:
    """Some kinds of iterations that come back, each a little different."""
    rng = np.random.default_rng(seed)
    keys, kinds = rng.standard_normal((4, HIDDEN)), rng.dirichlet(np.full(EXPERTS, 0.3), (4, LAYERS))
    found = []
    for kind in rng.integers(4, size=count):
        one = (0.8 * kinds[kind] + 0.2 * rng.dirichlet(np.ones(EXPERTS), LAYERS)).astype(np.float32)
        key = (keys[kind] + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)
        found.append(Iteration(request, key, one, np.argsort(-one, 1)[:, :K]))
    return found


def chosen(*experts: int) -> Iteration:
    """One layer of four experts."""
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
            named = [prediction.expert for _, prediction in match.predictions]
            hits[number, match.layer] = np.isin(one.chosen[match.layer], named).mean()
    found = map_figures.searched(maps, [(one.key, one.map) for one in before], distance, capacity)
    assert found.recall == pytest.approx(hits.mean(0).tolist()) and min(found.recall) > 0
    assert 0 < found.semantic <= 1.0001 and (found.trajectory > 0) == (distance < LAYERS)


def test_request_counts_begin_anew_with_every_answer() -> None:
    same, other = chosen(0, 1), chosen(2, 3)
    assert map_figures.counted([same, same, other]) == [pytest.approx(1 / 3)]
    assert map_figures.counted([same, same._replace(request=1)]) == [0.0]


@pytest.mark.long(0.2)
def test_all_of_it_on_the_demo_model() -> None:
    result: Any = json.loads(json.dumps(expert_maps.run(small=True, say=lambda text: None)))
    layers = result["layers"]
    assert result["tokens"] == 12 and list(result["distance"]) == [str(d) for d in range(1, layers + 1)]
    for of in ("probabilities", "activations"):
        assert 0 < result["entropy"][of]["fine"] <= result["entropy"][of]["coarse"] <= result["entropy"]["most"]
    assert result["entropy"]["activations"]["fine"] == pytest.approx(np.log2(result["top_k"]))
    assert all(-1 <= one["pearson"] <= 1 for one in result["correlation"].values())
    assert all(0 <= one["recall_in_time"] <= 1 for one in result["distance"].values())
    assert result["distance"]["3"]["recall_at_k"] == result["capacity"]["1000"]["recall_at_k"]
    text = expert_maps.table(result)
    assert all(one["claim"] in text for one in result["orderings"])
