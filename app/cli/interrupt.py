"""Ctrl-C during an answer: the first press stops the answer, the second exits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable(cancel: threading.Event) -> Iterator[None]:
    """Within this context, SIGINT sets `cancel`, or raises KeyboardInterrupt if it is already set. Undone on exit.

    Python delivers signals only to the main thread; in another thread this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
