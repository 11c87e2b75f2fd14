"""What FineMoE's figures ask of recorded expert maps: entropies, correlations, and searches among them."""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.harness.paired import pseudo_values
from core.policy.predict.maps import MapStore, best_match

Floats = npt.NDArray[np.floating]
DISTANCE = 3  # layers ahead: the paper's, where the store's capacity is varied and for correlations
TOGETHER = (1, 2, 3, 5, 10, 20, 40)  # iterations aggregated
PAIRED = 400  # iterations of which all pairs are compared
BINS = 10  # of similarity, from 0 to 1


class Iteration(NamedTuple):
    """One decoded token: its answer's number, embedding [H], map [L, E], and the experts chosen [L, k]."""

    request: int
    key: Floats
    map: Floats
    chosen: npt.NDArray[np.int64]


class Found(NamedTuple):
    """What searching for every iteration gave: recall@k by layer, the mean scores of the maps found, and by answer the
    means of all three."""

    recall: list[float]
    semantic: float
    trajectory: float
    blocks: dict[str, list[float]]


def searched(maps: Sequence[Iteration], before: Sequence[tuple[Floats, Floats]], distance: int, capacity: int) -> Found:
    """Searches for every iteration, one after the other, among those before it, as the prefetcher does: layers [0, d)
    by embedding, layer l >= d by the trajectory of layers [0, l - d]. The store starts with `before`, thinned evenly to
    its size."""
    layers, store = len(maps[0].map), filled(maps, before, capacity)
    hits, semantic, trajectory = np.zeros((len(maps), layers)), np.full(len(maps), np.nan), np.full(len(maps), np.nan)
    for number, now in enumerate(maps):
        places: dict[int, int] = {}
        if (match := best_match(store.by_embedding(now.key))) is not None:
            semantic[number] = match.score
            places |= dict.fromkeys(range(min(distance, layers)), match.place)
        walk, ahead = store.walk(), list[float]()
        for layer in range(layers):
            scores = walk.step(now.map[layer])
            if layer + distance < layers and (match := best_match(scores)) is not None:
                ahead.append(match.score)
                places[layer + distance] = match.place
        trajectory[number] = statistics.fmean(ahead) if ahead else np.nan
        for layer, place in places.items():
            k = now.chosen.shape[1]
            named = np.argsort(-store.maps[layer, place], kind="stable")[:k]
            hits[number, layer] = np.isin(now.chosen[layer], named).mean()
        store.add(now.key, now.map, distance, scores)
    each = {"recall": hits.mean(1), "semantic": semantic, "trajectory": trajectory}
    return Found(
        hits.mean(0).tolist(),
        float(np.nanmean(semantic)) if np.isfinite(semantic).any() else 0.0,
        float(np.nanmean(trajectory)) if np.isfinite(trajectory).any() else 0.0,
        {name: by_answer(maps, values) for name, values in each.items()},
    )


def by_answer(maps: Sequence[Iteration], values: Floats) -> list[float]:
    """The mean of an iteration's values [N] over each answer, without those that are not finite."""
    answers = np.array([one.request for one in maps])
    means = (values[(answers == one) & np.isfinite(values)] for one in dict.fromkeys(answers.tolist()))
    return [float(some.mean()) for some in means if some.size]


def covered(
    maps: Sequence[Iteration], before: Sequence[tuple[Floats, Floats]], capacity: int, least: float
) -> list[float]:
    """By answer, the share of iterations for which a store of `capacity` maps has one that is at least so similar, by
    the cosine of whole maps: what section 4.4 guarantees of 2LJ and of LJ ln(LJ) / 2 maps. The store is filled and
    thinned as in `searched`."""
    store, distance = filled(maps, before, capacity), DISTANCE
    found = np.zeros(len(maps))
    for number, now in enumerate(maps):
        walk = store.walk()
        for layer in range(len(now.map)):
            scores = walk.step(now.map[layer])
        match = best_match(scores)
        found[number] = match is not None and match.score >= least
        store.add(now.key, now.map, distance, scores)
    return by_answer(maps, found)


def filled(maps: Sequence[Iteration], before: Sequence[tuple[Floats, Floats]], capacity: int) -> MapStore:
    """A store that holds `before`, thinned evenly to its size."""
    layers, experts = maps[0].map.shape
    store = MapStore(capacity, layers, experts, len(maps[0].key))
    for at in np.linspace(0, len(before) - 1, min(len(before), capacity)).round().astype(int).tolist():
        key, one = before[at]
        store.add(key, one, DISTANCE, np.zeros(store.count, np.float32))
    return store


def counted(maps: Sequence[Iteration]) -> Floats:
    """[N, L] recall@k of the answer's counts so far (MoE-Infinity's activation matrix), which no distance changes."""
    layers, experts = maps[0].map.shape
    hits, uses, request = np.zeros((len(maps), layers)), np.zeros((layers, experts)), -1
    for number, one in enumerate(maps):
        if one.request != request:
            request, uses = one.request, np.zeros((layers, experts))
        k = one.chosen.shape[1]
        for layer in range(layers if uses.any() else 0):
            named = np.argsort(-uses[layer], kind="stable")[:k]
            hits[number, layer] = np.isin(one.chosen[layer], named).mean()
        np.put_along_axis(uses, one.chosen, np.take_along_axis(uses, one.chosen, 1) + 1, 1)
    return hits


def entropies(maps: Sequence[Iteration]) -> dict[str, Any]:
    """Bits a layer, mean over layers (figure 3): of the router's probabilities and of the activations, of one iteration
    (fine), of all of an answer's together (coarse), and of the first n of an answer, over answers that have as many."""
    answers: dict[int, list[Iteration]] = {}
    for one in maps:
        answers.setdefault(one.request, []).append(one)
    found: dict[str, Any] = {}
    for name, of in (("probabilities", _probabilities), ("activations", _activations)):
        of_each = [np.stack([of(one) for one in answer]) for answer in answers.values()]
        enough = {n: [rows for rows in of_each if len(rows) >= n] for n in TOGETHER}
        longest = max((n for n, rows in enough.items() if rows), default=0)
        found[name] = {
            "fine": _mean([float(entropy(row).mean()) for rows in of_each for row in rows]),
            "coarse": _mean([float(entropy(rows.mean(0)).mean()) for rows in of_each]),
            "together": {
                str(n): _mean([float(entropy(rows[:n].mean(0)).mean()) for rows in enough[longest]])
                for n in TOGETHER
                if n <= longest
            },
            "answers_together": len(enough[longest]) if longest else 0,
            "blocks": {
                "a token": [float(entropy(rows).mean()) for rows in of_each],
                "an answer": [float(entropy(rows.mean(0)).mean()) for rows in of_each],
            },
            "together_blocks": {
                str(n): [float(entropy(rows[:n].mean(0)).mean()) for rows in enough[longest]]
                for n in TOGETHER
                if n <= longest
            },
        }
    return {**found, "answers": len(answers), "most": float(np.log2(maps[0].map.shape[1]))}


def entropy(shares: Floats) -> Floats:
    """[..., E] not necessarily adding up to 1 -> [...] Shannon entropy in bits."""
    p = shares / shares.sum(-1, keepdims=True)
    bits: Floats = -(p * np.log2(np.where(p > 0.0, p, 1.0))).sum(-1)
    return bits


def correlations(maps: Sequence[Iteration]) -> dict[str, Any]:
    """Over all pairs of (evenly chosen) iterations: Pearson's r of the score with the share of experts in common, and
    the mean share by score (figures 8 and 9); "pearson_blocks": r's pseudo-values over the answers. "trajectory": of
    whole maps, as there; "ahead": of layers [0, l - d] with the experts in common in layer l, as a search has it."""
    some = [maps[int(at)] for at in np.unique(np.linspace(0, len(maps) - 1, min(len(maps), PAIRED)).round())]
    layers = len(some[0].map)
    active = np.stack([_activations(one) for one in some])  # [N, L, E]
    routes = np.stack([one.map for one in some]).astype(np.float64)
    upper = np.triu_indices(len(some), 1)
    k = some[0].chosen.shape[1]
    common = np.einsum("nle,mle->lnm", active, active)[:, *upper] / k  # [L, pairs]
    keys = np.stack([one.key for one in some]).astype(np.float64)
    scores = {
        "semantic": (_cosines(keys)[upper], common.mean(0)),
        "trajectory": (_cosines(routes.reshape(len(some), -1))[upper], common.mean(0)),
    }
    if layers > DISTANCE:
        ahead = [_cosines(routes[:, : layer + 1].reshape(len(some), -1))[upper] for layer in range(layers - DISTANCE)]
        scores["ahead"] = np.concatenate(ahead), common[DISTANCE:].reshape(-1)
    answers = np.array([one.request for one in some])
    groups = [[one] for one in dict.fromkeys(answers.tolist())]

    def of_answers(score: Floats, hit: Floats, kept: Sequence[list[int]]) -> float:
        inside = np.isin(answers, [number for one in kept for number in one])
        pairs = np.tile(inside[upper[0]] & inside[upper[1]], len(score) // len(upper[0]))
        return pearson(score[pairs], hit[pairs]) or 0.0

    return {
        name: {
            "pearson": pearson(score, hit),
            "pearson_blocks": pseudo_values(groups, partial(of_answers, score, hit)),
            "bins": _bins(score, hit),
            "pairs": len(score),
        }
        for name, (score, hit) in scores.items()
    }


def pearson(a: Floats, b: Floats) -> float | None:
    """Pearson's r; None where one of the two does not vary."""
    if len(a) < 2 or not float(np.std(a)) or not float(np.std(b)):
        return None
    return float(np.corrcoef(a, b)[0, 1])


def stored_bytes(capacity: int, maps: Sequence[Iteration]) -> int:
    """Bytes of a full store (figure 18): maps and embeddings in fp32."""
    return 4 * capacity * (maps[0].map.size + len(maps[0].key))


def _probabilities(one: Iteration) -> Floats:
    return one.map.astype(np.float64)


def _activations(one: Iteration) -> Floats:
    active = np.zeros(one.map.shape)
    np.put_along_axis(active, one.chosen, 1.0, 1)
    return active


def _cosines(rows: Floats) -> Floats:
    units = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    found: Floats = units @ units.T
    return found


def _bins(scores: Floats, hits: Floats) -> list[float | None]:
    """[BINS] mean hits of the pairs with a score in each tenth from 0 to 1; None = there are none."""
    at = np.clip((scores * BINS).astype(int), 0, BINS - 1)
    return [float(hits[at == one].mean()) if (at == one).any() else None for one in range(BINS)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
