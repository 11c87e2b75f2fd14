"""The routing of the session's decoded tokens, kept in memory for plans of the cache."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from core.types import StepRecord

MOST = 100_000  # tokens kept: the last ones
MOST_BYTES = 80 << 20  # of their ids, at most

Ids = npt.NDArray[np.int16]


class RoutedTokens:
    """Of one load at a time. `add` is called by the thread that writes answers, and only appends; the rest by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load: int | None = None
        self._ids: deque[Ids] = deque()
        self._tokens = 0  # since the load, those forgotten included

    def add(self, load: int, step: StepRecord) -> None:
        """A pass of a load: kept if it decoded one token. The first one of another load forgets what was kept."""
        if step.phase != "decode" or step.tokens != 1 or not step.ids.size:
            return
        ids = np.array(step.ids[:, 0], np.int16)
        with self._lock:
            if load != self._load or (self._ids and self._ids[0].shape != ids.shape):
                self._load, self._tokens = load, 0
                self._ids = deque(maxlen=max(1, min(MOST, MOST_BYTES // ids.nbytes)))
            self._ids.append(ids)
            self._tokens += 1

    def tokens(self, load: int | None) -> int:
        """Tokens decoded since that load, those no longer kept included."""
        with self._lock:
            return self._tokens if load == self._load else 0

    def snapshot(self, load: int | None) -> npt.NDArray[Any] | None:
        """The kept experts [T, L, k] of that load, oldest first; None when there are none."""
        with self._lock:
            kept = list(self._ids) if load == self._load else []
        return np.stack(kept) if kept else None
