"""What the path net learns from: every text has the same chance, and no more is kept than said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from core.measure.calibrate import paths as module
from core.measure.calibrate.paths import Paths

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
