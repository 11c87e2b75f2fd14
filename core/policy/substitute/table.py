"""A substitute whose scores are the same for all tokens: one matrix per layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core.policy.substitute.base import Ask, Substitute

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ScoreTable(Substitute):
    """Base class. Stores the matrix twice: on the device, fp16 [L, E, E], and on the host for single tokens."""

    def __init__(self) -> None:
        self._rows: npt.NDArray[np.float16] = np.zeros((0, 0, 0), np.float16)
        self._table: Tensor | None = None

    def hold(self, scores: npt.NDArray[np.floating], device: torch.device) -> None:
        """Set the scores [L, E, E], not negative; excludes each expert as its own substitute."""
        import torch

        self._rows = np.asarray(scores, np.float16).copy()
        each = np.arange(self._rows.shape[-1])
        self._rows[:, each, each] = -np.inf
        self.experts = len(each)
        self._table = torch.from_numpy(self._rows).to(device)
        self.bytes = self._rows.nbytes if device.type != "cpu" else 0

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        found: list[float] = self._rows[ask.layer, expert].tolist()
        return enumerate(found)

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        assert self._table is not None
        return None, self._table[ask.layer].index_select(0, ask.ids[:, position]).float()

    def matrix(self, layer: int) -> Tensor | None:
        assert self._table is not None
        return self._table[layer].float().clamp_min(0.0)
