"""A token's experts are weighted in the router's order, in whatever order they were computed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.cache.lease import LeasedSegment
from core.runtime.expert_rows import TokenRows
from core.runtime.routed import Routed
from core.types import Outcome, Segment

CHOSEN = [3, 0, 2]
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2]])


def leased(expert: int) -> LeasedSegment:
    slot: Any = SimpleNamespace(of=expert)
    return LeasedSegment(expert, Segment(expert, range(1)), (slot,), Outcome.MISS, None)


def math() -> Any:
    """Expert e makes e + 1 times the state."""

    def token(slots: Any, x: torch.Tensor, places: Any = None) -> torch.Tensor:
        return torch.cat([x * (slot.of + 1) for slot in slots])

    def combine(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype, tap: Any = None) -> torch.Tensor:
        return (rows * weights.T).sum(0, keepdim=True)

    return SimpleNamespace(joined=None, placed=False, token=token, combine=combine)


@pytest.mark.parametrize("order", [*itertools.permutations(CHOSEN)])
@pytest.mark.parametrize("together", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_the_order_in_which_experts_are_computed_changes_nothing(order: tuple[int, ...], together: list[int]) -> None:
    ids = torch.tensor([CHOSEN])
    rows = TokenRows(math(), torch.ones(1, 2), Routed(ids, WEIGHTS, [CHOSEN], CHOSEN, [CHOSEN]))
    computed = iter(order)
    for count in together:
        rows.compute([leased(expert) for expert in itertools.islice(computed, count)])
    want = sum(float(w) * (e + 1) for w, e in zip(WEIGHTS[0], CHOSEN, strict=True))
    assert torch.allclose(rows.combined(), torch.full((1, 2), want))
