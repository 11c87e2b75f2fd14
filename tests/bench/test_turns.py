"""bench turns: all of it on the demo model, and that it can tell other bits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import turns


def test_one_bit_more_or_one_token_less_is_not_the_same() -> None:
    one = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert turns._same(one, [each.clone() for each in one])
    assert not turns._same(one, one[:1])
    assert not turns._same(one, [one[0], torch.nextafter(one[1], torch.tensor([9.0, 9.0]))])


@pytest.mark.long(0.3)
def test_all_of_it_on_the_demo_model() -> None:
    result: Any = json.loads(json.dumps(turns.run(small=True, say=lambda text: None)))
    first, new, answer = turns.FIRST, turns.NEW, turns.ANSWER
    assert result["same_bits"] is True
    assert result["reused"] == [0, first + answer - 1, first + new + 2 * answer - 1]
    assert result["read"] == [first, new + 1, new + 1]
    assert result["ratio"] > 0 and result["moved_ratio"] > 0 and len(result["alone_ms"]) == 2
    assert 0 <= result["anew_difference"] < 0.1
    assert "the same bits" in turns.table(result)
