"""Keeps the logits that some of an answer's tokens were drawn from: evenly spread, bounded, without holding it up."""

from __future__ import annotations

from typing import Any

import torch

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, and so are those below any bound, over time
MOST_TOKENS = 128  # of one answer
MOST_BYTES = 32 << 20


class Landing:
    """One row of pinned memory, through which rows leave a GPU while it goes on computing."""

    def __init__(self) -> None:
        self._row: torch.Tensor | None = None
        self._event: Any = None

    def take(self, row: torch.Tensor) -> None:
        """Begin to copy a row [V]. The one before must have been collected."""
        if self._row is None or self._row.shape != row.shape or self._row.dtype != row.dtype:
            self._row = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._row.copy_(row, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def collect(self) -> torch.Tensor:
        """The row, in memory of its own. It has long arrived: a token was drawn from it meanwhile."""
        self._event.synchronize()
        assert self._row is not None
        return self._row.clone()


class Sample:
    """`rows`: token -> its logits [V] on the host, in the dtype that the model gave them.

    Token t is kept if frac(t x golden ratio) is below the rate asked for. When there are too many, the bound is halved
    and those above it are forgotten, so that they are spread evenly over an answer of any length.
    """

    def __init__(self, landing: Landing | None = None) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self._landing = landing  # on a GPU
        self._landed: int | None = None
        self._limit = 1.0

    def keep(self, token: int, logits: torch.Tensor, rate: float) -> None:
        """Token `token` (from 0) of the answer is about to be drawn from logits [V]; keep them if it is its turn."""
        at = token * GOLDEN % 1.0
        if at >= rate or at >= self._limit:
            return
        if self._landing is None:
            self.rows[token] = logits.clone()
        else:
            self.finish()
            self._landing.take(logits)
            self._landed = token
        most = max(1, min(MOST_TOKENS, MOST_BYTES // (logits.numel() * logits.itemsize)))
        while len(self.rows) + (self._landed is not None) > most:
            self._limit = min(self._limit, rate) / 2
            self.rows = {one: row for one, row in self.rows.items() if one * GOLDEN % 1.0 < self._limit}
            if at >= self._limit:
                self._landed = None

    def finish(self) -> dict[int, torch.Tensor]:
        """Everything kept, all of it on the host."""
        if self._landed is not None:
            assert self._landing is not None
            self.rows[self._landed] = self._landing.collect()
            self._landed = None
        return self.rows
