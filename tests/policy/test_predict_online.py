"""Predictors that learn from routing as it comes: one contract for all, their formulas by hand and by brute force."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.settings.registry import variants
from tests.policy.views import Looking, Pass, make, random_known, random_passes, shown
from tests.selection import examples, layered

NAMES = [v.name for v in variants("predictor")]
LEARNING = ["previous_token", "transitions", "recent", "request", "all_next"]


def by_hand(name: str, path: Sequence[Sequence[Sequence[int]]], **params: float) -> list[list[tuple[int, int, float]]]:
    """Guesses at every layer for single tokens of one request, each [L][k], among 4 experts."""
    passes = [Pass(1, np.array(token)[:, None]) for token in path]
    found = shown(make(name, **params), passes, 4)
    return [[(g.layer, g.expert, pytest.approx(g.score)) for g in predictions] for _, _, predictions in found]


MIX = [(1, 5), (1, 3), (1, 1), (1, 1), (2, 4), (2, 1), (2, 1), (3, 1), (3, 1), (3, 2)]


@pytest.mark.parametrize("layers", layered([1, 2, 5], quick=lambda layers: layers == 5))
@pytest.mark.parametrize(
    "params",
    layered(
        [{}, {"width": 1}, {"width": 3}, {"distance": 2}, {"width": 2, "distance": 16}],
        quick=lambda params: len(params) != 1,
    ),
)
@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_distinct_experts_that_exist_best_first(name: str, params: dict[str, int], layers: int) -> None:
    known = {p.name for v in variants("predictor") if v.name == name for p in v.params}
    params = {key: value for key, value in params.items() if key in known}
    passes, experts, k = random_passes(MIX, layers, 8, 2), 8, 2
    predicted = list(shown(make(name, **params), passes, experts, random_known(layers, experts)))
    most = params.get("width") or (experts if name in ("all_next", "expert_map") else k)
    for at, layer, predictions in predicted:
        assert len({(g.layer, g.expert) for g in predictions}) == len(predictions)
        assert all(0 <= g.layer < layers and 0 <= g.expert < experts for g in predictions)
        assert {type(g.expert) for g in predictions} | {type(g.layer) for g in predictions} <= {int}
        assert all(np.isfinite(g.score) and 0 <= g.score <= 1 for g in predictions)
        for ahead, some in groupby(sorted(predictions, key=lambda g: g.layer), lambda g: g.layer):
            named = list(some)
            assert len(named) <= min(experts, most * len(passes[at].ids[0]))
            assert all(a.score >= b.score for a, b in pairwise(named))
            assert ahead != layer or layers == 1
        if name in LEARNING:
            ahead = max(1, min(params.get("distance", 1), layers - 1))
            assert {g.layer for g in predictions} <= {(layer + ahead) % layers}
            assert all(0 < g.score <= 1 for g in predictions)
    assert predicted == list(shown(make(name, **params), passes, experts, random_known(layers, experts)))
    assert any(predictions for _, _, predictions in predicted) == make(name).looks


@pytest.mark.parametrize("name", ["previous_token", "transitions", "recent", "request"])
def test_nothing_is_named_before_anything_was_seen(name: str) -> None:
    (first,) = random_passes([(1, 1)], 3, 8, 2)
    assert [len(predictions) > 0 for _, _, predictions in shown(make(name), [first], 8)][:2] == [False, False]


@pytest.mark.parametrize("name", ["recent", "transitions", "request"])
def test_a_floor_keeps_the_unlikely_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.policy.predict.recent.TOKENS", 1)
    passes = random_passes([(1, 1)] * 12, 3, 8, 2)
    free = [g for *_, predictions in shown(make(name, width=8), passes, 8) for g in predictions]
    bound = [g for *_, predictions in shown(make(name, width=8, floor=0.5), passes, 8) for g in predictions]
    assert bound == [g for g in free if g.score >= 0.5]
    assert bound


TOKENS = [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[1, 0], [3, 1]]]  # three tokens, two layers, top-2 of four experts


def test_the_previous_token_by_hand() -> None:
    predicted = by_hand("previous_token", [*TOKENS, [[1, 0], [2, 0]]])
    assert predicted[0] == []  # layer 1 has not been seen
    assert predicted[1] == [(0, 0, 1 / 2), (0, 1, 1 / 2)]  # layer 0 of this token, for the next one's
    assert predicted[2] == [(1, 2, 1 / 2), (1, 3, 1 / 2)]  # layer 1 of the first token, in its router's order
    # Layer 0: of 0 1 came 1, of 1 2 came 1, of 1 0 both: four of the six that were named, (4 + 1) / (6 + 2).
    assert predicted[7] == [(0, 1, 5 / 8), (0, 0, 5 / 8)]


def test_of_several_tokens_at_once_the_last_one_is_the_previous_token() -> None:
    passes = [Pass(1, np.array(TOKENS).swapaxes(0, 1)), Pass(1, np.array(TOKENS[0])[:, None])]
    *_, at_0, _ = [predictions for _, _, predictions in shown(make("previous_token"), passes, 4)]
    assert [(g.layer, g.expert) for g in at_0] == [(1, 3), (1, 1)]


SIZES = st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=8).map(
    lambda sizes: [(sum(new for new, _ in sizes[: i + 1]), tokens) for i, (_, tokens) in enumerate(sizes)]
)


def flat(passes: Sequence[Pass], at: int, layer: int) -> list[tuple[int, list[list[int]]]]:
    """(request, choices of the layers known) of every token, when `layer` of pass `at` has been routed."""
    return [
        (one.request, one.ids[: layer + 1 if i == at else None, t].tolist())
        for i, one in enumerate(passes[: at + 1])
        for t in range(one.ids.shape[1])
    ]


@examples(60)
@given(SIZES, st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_transitions_by_brute_force(sizes: list[tuple[int, int]], layers: int, distance: int, seed: int) -> None:
    passes = random_passes(sizes, layers, 6, 2, seed)
    predictor, reach = make("transitions", width=6, distance=distance), max(1, min(distance, layers - 1))
    for at, layer, predictions in shown(predictor, passes, 6):
        tokens = flat(passes, at, layer)
        pairs: defaultdict[tuple[int, int], float] = defaultdict(float)
        came: defaultdict[int, float] = defaultdict(float)
        for i, (request, path) in enumerate(tokens):
            over, target = divmod(layer + reach, layers)
            if i + over >= len(tokens) or tokens[i + over][0] != request or target >= len(tokens[i + over][1]):
                continue
            for s in path[layer]:
                came[s] += 1.0
                for e in tokens[i + over][1][target]:
                    pairs[s, e] += 1.0
        asking = tokens[-len(passes[at].ids[0]) :] if layer + reach < layers else tokens[-1:]
        want: defaultdict[int, float] = defaultdict(float)
        for _, path in asking:
            known = [s for s in path[layer] if s in came]
            for s in known:
                for e in range(6):
                    want[e] += pairs[s, e] / came[s] / len(known) / len(asking)
        most = min(6, 6 * len(asking))
        assert {g.expert: g.score for g in predictions} == pytest.approx({e: p for e, p in want.items() if p}, rel=1e-4)
        assert len(predictions) <= most


@examples(60)
@given(SIZES, st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_uses_by_brute_force(sizes: list[tuple[int, int]], layers: int, distance: int, window: int, seed: int) -> None:
    passes = random_passes(sizes, layers, 6, 2, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.policy.predict.recent.TOKENS", window)
        predicted = {
            name: [*shown(make(name, distance=distance, **more), passes, 6)]
            for name, more in {"recent": {"width": 6}, "request": {"width": 6}, "all_next": {}}.items()
        }
    for (at, layer, recent), (_, _, request), (_, _, everything) in zip(*predicted.values(), strict=True):
        ahead = (layer + max(1, min(distance, layers - 1))) % layers
        known = [(number, path[ahead]) for number, path in flat(passes, at, layer) if len(path) > ahead]
        now = passes[at].request
        for predictions, chosen in (
            (recent, [row for _, row in known][-window:]),
            (request, [row for number, row in known if number == now]),
        ):
            uses = [sum(e in row for row in chosen) for e in range(6)]
            last = [max((i for i, row in enumerate(chosen) if e in row), default=-1) for e in range(6)]
            order = sorted((e for e in range(6) if uses[e]), key=lambda e: (-uses[e], -last[e], e))
            assert [(g.expert, g.score) for g in predictions] == [(e, uses[e] / len(chosen)) for e in order]
        uses = [sum(e in row for _, row in known) for e in range(6)]
        assert {g.expert: g.score for g in everything} == {e: (uses[e] + 1) / (len(known) + 2) for e in range(6)}


def test_a_pass_that_broke_off_is_not_taken_for_the_token_before() -> None:
    whole, broken, after = random_passes([(1, 1)] * 3, 3, 6, 1, seed=4)
    predictor = make("transitions", width=6)
    for layer in range(3):
        predictor.predict(Looking(whole, layer, 6))
    predictor.predict(Looking(broken, 0, 6))
    for layer in range(3):
        predictions = predictor.predict(Looking(after, layer, 6))
    source = after.ids[2][0, 0]
    wanted = {broken.ids[0][0, 0]} if source == whole.ids[2][0, 0] else set()
    assert {g.expert for g in predictions} == wanted


def test_random_predictions_are_even_and_repeat() -> None:
    passes = random_passes([(1, 1)] * 400, 3, 8, 2)
    runs = [list(shown(make("random"), passes, 8)) for _ in range(2)]
    assert runs[0] == runs[1]
    drawn = [g for _, _, predictions in runs[0] for g in predictions]
    assert len(drawn) == 400 * 3 * 2
    assert {g.score for g in drawn} == {0.25}
    counts = np.bincount([g.layer * 8 + g.expert for g in drawn], minlength=24)
    assert np.abs(counts - 100).max() < 50  # more than five standard deviations


def test_a_random_prediction_for_a_prompt_is_likelier() -> None:
    (_, at_0, found), *_, (_, _, last) = shown(make("random"), random_passes([(1, 3)], 3, 8, 2), 8)
    assert at_0 == 0 and len(found) == 6 and all(g.score == pytest.approx(1 - 0.75**3) for g in found)
    assert len(last) == 2 and {g.score for g in last} == {0.25}  # of the next token, which is one
