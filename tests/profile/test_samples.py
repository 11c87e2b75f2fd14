"""What networks learn from: every token and every text has the same chance, and no more is kept than said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from core.calibrate import samples
from core.calibrate.samples import Paths, States
from core.runtime.measurement import LayerRun

L, E, H = 2, 4, 3


def feed(states: States, total: int, pieces: list[int]) -> None:
    """Tokens 0 .. total: token t has the state (t, t, t) + layer / 2 and the distribution t everywhere."""
    for part in np.array_split(np.arange(total), pieces):
        if not len(part):
            continue
        states.begin(len(part))
        for layer in range(L):
            each = torch.tensor(part, dtype=torch.float32)[:, None]
            seen = SimpleNamespace(layer=layer, hidden=each.expand(-1, H) + layer / 2, probs=each.expand(-1, E))
            ids = torch.zeros(len(part), 2, dtype=torch.int64)
            states.add(cast(LayerRun, SimpleNamespace(seen=seen, ids=ids)))


def test_few_tokens_are_all_kept_in_order() -> None:
    states = States(L, E, H, tokens=20)
    feed(states, 12, [5, 6])
    assert states.states().shape == (12, L, H) and states.probs().shape == (12, L, E)
    assert states.states()[:, 0, 0].tolist() == list(range(12)) == states.probs()[:, 1, 3].tolist()
    assert states.states()[:, 1, 2].tolist() == [t + 0.5 for t in range(12)]


def test_of_many_each_has_the_same_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    total, kept, rounds, hits = 60, 20, 400, np.zeros(60)
    for seed in range(rounds):
        monkeypatch.setattr(samples, "SEED", seed)
        states = States(L, E, H, tokens=kept)
        feed(states, total, [7, 25, 26, 59])
        found = states.states()[:, 0, 0].astype(int)
        assert len(set(found.tolist())) == kept  # nobody twice, and layers belong together
        np.testing.assert_array_equal(states.states()[:, 1, 0], found + 0.5)
        hits[found] += 1
    expected = rounds * kept / total
    assert (abs(hits - expected) < 5 * np.sqrt(expected * (1 - kept / total))).all()


def test_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "STATES_BYTES", 10 * 2 * L * (E + H) + 5)
    states = States(L, E, H)
    feed(states, 100, [10])
    assert len(states.states()) == 10


def passage(tokens: int, first: int) -> tuple[Any, Any]:
    return np.arange(first, first + tokens), np.full((tokens, L, 2), first % E)


def test_texts_are_kept_whole_and_bounded() -> None:
    paths = Paths(E, tokens=100)
    for i in range(40):
        paths.add(*passage(10, 1000 * i), prompt=4)
    found = paths.passages()
    assert len(found) == 10 and [p.ids[0] for p in found] == sorted(p.ids[0] for p in found)
    for one in found:
        assert list(one.prompt) == list(one.ids)[:4] and one.routes.shape == (10, L, 2)
        assert one.routes.dtype == torch.uint8
    assert [p.ids[0] for p in found] != [1000 * i for i in range(10)]  # not merely the first ones
    lone = Paths(E, tokens=5)
    lone.add(*passage(50, 0), prompt=1)
    assert len(lone.passages()) == 1  # never less than one


def test_each_text_has_the_same_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = np.zeros(12)
    for seed in range(600):
        monkeypatch.setattr(samples, "SEED", seed)
        paths = Paths(E, tokens=20)
        for i in range(12):
            paths.add(*passage(5, 100 * i), prompt=2)
        for one in paths.passages():
            hits[one.ids[0] // 100] += 1
    assert hits.sum() == 600 * 4 and (abs(hits - 200) < 5 * np.sqrt(200 * 2 / 3)).all()
