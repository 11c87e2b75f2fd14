"""Whose turn it is with a model: one caller at a time, and guests who leave when somebody else comes."""

from __future__ import annotations

import threading
from typing import Literal


class Turn:
    """Like a lock; but a guest, who must look at `asked` all the time, gives way to whoever calls `take`."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._holder: Literal["nobody", "owner", "guest", "brief"] = "nobody"
        self._asking = 0

    def take(self, *, briefly: bool = False) -> bool:
        """Have the turn at once, or when a guest has left; False when another caller has it.

        `briefly`: for so short a time that the next caller waits, and is not told that it is taken.
        """
        with self._news:
            self._asking += 1
            try:
                self._news.wait_for(lambda: self._holder in ("nobody", "owner"))
                if self._holder == "owner":
                    return False
                self._holder = "brief" if briefly else "owner"
                return True
            finally:
                self._asking -= 1

    def visit(self) -> bool:
        """Have it as a guest; False when anybody else has it or asks for it."""
        with self._news:
            if self._holder != "nobody" or self._asking:
                return False
            self._holder = "guest"
            return True

    def give(self) -> None:
        """Let go of it."""
        with self._news:
            self._holder = "nobody"
            self._news.notify_all()

    @property
    def asked(self) -> bool:
        """Somebody waits for the guest to leave."""
        return self._asking > 0

    @property
    def taken(self) -> bool:
        """Somebody has it who is no guest."""
        return self._holder == "owner"
