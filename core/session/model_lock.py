"""Exclusive use of a loaded model: one owner at a time, brief holders that the next caller waits for, and idle work."""

from __future__ import annotations

import threading
from typing import Literal

Holder = Literal["free", "owner", "brief", "idle"]


class ModelLock:
    """Like a lock, with three kinds of holders.

    An owner (an answer, a measurement) excludes other callers: they are refused at once. A brief holder (applying
    settings) makes other callers wait. An idle holder (scoring answers) must poll `asked` and release when it is set;
    callers wait until it has. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: Holder = "free"
        self._waiting = 0

    def acquire(self, *, briefly: bool = False) -> bool:
        """Waits for a brief or an idle holder to release; False when an owner holds it."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder in ("free", "owner"))
                if self._holder == "owner":
                    return False
                self._holder = "brief" if briefly else "owner"
                return True
            finally:
                self._waiting -= 1

    def try_acquire_idle(self) -> bool:
        """Acquire it for idle work; False when another thread holds it or waits for it."""
        with self._changed:
            if self._holder != "free" or self._waiting:
                return False
            self._holder = "idle"
            return True

    def release(self) -> None:
        """Release it, whatever kind the holder is."""
        with self._changed:
            self._holder = "free"
            self._changed.notify_all()

    @property
    def asked(self) -> bool:
        """Whether a caller waits for the holder to release."""
        return self._waiting > 0

    @property
    def taken(self) -> bool:
        """Whether an owner holds it."""
        return self._holder == "owner"
