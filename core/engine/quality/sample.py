"""Keeps the logits of a sample of an answer's tokens: evenly spread, bounded in bytes, without stalling the answer."""

from typing import Any

import torch

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are evenly spread, and so are, over time, those below any bound
MOST_TOKENS = 128  # per answer
MOST_BYTES = 32 << 20


class Landing:
    """One row of pinned memory, through which logits leave a GPU while it goes on computing."""

    def __init__(self) -> None:
        self._row: torch.Tensor | None = None
        self._event: Any = None

    def take(self, row: torch.Tensor) -> None:
        """Starts copying a row [V]. The previous row must have been collected."""
        if self._row is None or self._row.shape != row.shape or self._row.dtype != row.dtype:
            self._row = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._row.copy_(row, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def collect(self) -> torch.Tensor:
        """The row, in its own memory. The copy finished long ago: a token was drawn from the row meanwhile."""
        self._event.synchronize()
        assert self._row is not None
        return self._row.clone()


class Sample:
    """`rows`: token -> its logits [V] on the host, in the model's dtype.

    Token t is kept if frac(t x golden ratio) is below the rate. When there are too many, the bound is halved and those
    above it are dropped, so that the kept tokens are evenly spread over an answer of any length.
    """

    def __init__(self, landing: Landing | None = None) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self._landing = landing  # on a GPU
        self._landed: int | None = None
        self._limit = 1.0

    def keep(self, token: int, logits: torch.Tensor, rate: float) -> None:
        """Token `token` (from 0) of the answer is about to be drawn from logits [V]; keeps them if the token
        is sampled."""
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
