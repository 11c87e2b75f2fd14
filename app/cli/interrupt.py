"""Ctrl-C during an answer: the first press asks it to stop, the second leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable(cancel: threading.Event) -> Iterator[None]:
    """While inside, SIGINT sets `cancel`; when it is set already, KeyboardInterrupt is raised. Undone on leaving.

    Python delivers signals to the main thread alone; in another thread this changes nothing.
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
