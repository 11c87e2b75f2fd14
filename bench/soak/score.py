"""What the clients did and what went wrong, counted from many threads."""

from __future__ import annotations

import threading
from collections import Counter

MOST_TOLD = 50


class Score:
    """Counts of what was done and refused, and errors in words."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._errors: list[str] = []
        self.errors = 0

    def did(self, what: str) -> None:
        """One more of these."""
        with self._lock:
            self._done[what] += 1

    def refused(self, what: str) -> None:
        """The server said, in words, that this cannot be now: no error."""
        with self._lock:
            self._refused[what] += 1

    def error(self, text: str) -> None:
        """Something broke."""
        with self._lock:
            self.errors += 1
            if len(self._errors) < MOST_TOLD:
                self._errors.append(text)

    def told(self) -> dict[str, object]:
        """Everything as plain data."""
        with self._lock:
            return {
                "done": dict(sorted(self._done.items())),
                "refused": dict(sorted(self._refused.items())),
                "errors": self.errors,
                "first_errors": list(self._errors),
            }
