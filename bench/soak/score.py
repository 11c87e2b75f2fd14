"""Counts of the clients' actions and errors. May be updated from many threads."""

from __future__ import annotations

import threading
from collections import Counter

MOST_TOLD = 50


class Score:
    """Counts of actions and refusals, and error messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._errors: list[str] = []
        self.errors = 0

    def did(self, what: str) -> None:
        """Counts one action."""
        with self._lock:
            self._done[what] += 1

    def refused(self, what: str) -> None:
        """Counts a refusal: the server said that this is not possible now, which is no error."""
        with self._lock:
            self._refused[what] += 1

    def error(self, text: str) -> None:
        """Adds an error."""
        with self._lock:
            self.errors += 1
            if len(self._errors) < MOST_TOLD:
                self._errors.append(text)

    def summary(self) -> dict[str, object]:
        """Everything as plain data."""
        with self._lock:
            return {
                "done": dict(sorted(self._done.items())),
                "refused": dict(sorted(self._refused.items())),
                "errors": self.errors,
                "first_errors": list(self._errors),
            }
