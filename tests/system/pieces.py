"""Pieces of work for other processes; a module of their own, so that those have little to import."""

import os
import threading

from core.errors import TraceError


def times_two(number: int) -> int:
    return 2 * number


def refuse(number: int) -> int:
    raise TraceError(f"{number} is not a trace.")


def die() -> None:
    os._exit(3)


def wait_for_ever() -> None:
    threading.Event().wait()
