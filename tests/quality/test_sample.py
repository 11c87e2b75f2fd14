"""Which tokens are kept: as many as asked for, evenly spread, never too many."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.engine.quality import sample
from core.engine.quality.sample import GOLDEN, MOST_TOKENS, Sample
from tests.selection import examples


def keep(tokens: int, rate: float, width: int = 3) -> dict[int, torch.Tensor]:
    kept = Sample()
    for token in range(tokens):
        kept.keep(token, torch.full((width,), float(token)), rate)
    return kept.finish()


@given(tokens=st.integers(0, 700), rate=st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 1.0]))
@examples(60)
def test_as_many_as_asked_for_evenly_spread_and_never_too_many(tokens: int, rate: float) -> None:
    rows = keep(tokens, rate)
    assert all((row == token).all() for token, row in rows.items())
    assert (0 in rows) == (tokens > 0 and rate > 0), "even the shortest answer is scored"
    bound = rate
    while sum(t * GOLDEN % 1.0 < bound for t in range(tokens)) > MOST_TOKENS:
        bound /= 2
    assert sorted(rows) == [t for t in range(tokens) if t * GOLDEN % 1.0 < bound]
    assert len(rows) <= MOST_TOKENS
    assert abs(len(rows) - bound * tokens) <= 3
    for low in range(0, tokens - 99, 50):  # any hundred in a row have their share
        assert abs(sum(low <= t < low + 100 for t in rows) - 100 * bound) <= 4


def test_a_long_answer_is_not_kept_at_its_beginning_only() -> None:
    rows = sorted(keep(5000, 1.0))
    assert MOST_TOKENS / 2 <= len(rows) <= MOST_TOKENS
    assert max(b - a for a, b in pairwise(rows)) <= 3 * 5000 / len(rows)


def test_wide_rows_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MOST_BYTES", 1 << 16)
    width = sample.MOST_BYTES // 4 // 8 + 1  # seven fit
    rows = keep(40, 1.0, width)
    assert 1 <= len(rows) <= 7
    assert len(keep(9, 1.0, sample.MOST_BYTES)) == 1, "one that is too wide is kept all the same"


def test_what_is_kept_is_a_copy() -> None:
    kept, row = Sample(), torch.zeros(4)
    kept.keep(0, row, 1.0)
    row.fill_(9.0)
    assert kept.finish()[0].tolist() == [0.0] * 4
