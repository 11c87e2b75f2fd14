"""Processes that are of no use."""

from multiprocessing.connection import Connection
from typing import Any


def deaf(pipe: Connection, memory: Any) -> None:
    """It hears all that it is told, until its end, and does nothing."""
    while True:
        pipe.recv_bytes()


def failing(pipe: Connection, memory: Any) -> None:
    """It ends at once."""
    raise SystemExit(1)
