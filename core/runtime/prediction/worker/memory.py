"""The memory that a predictor's worker process shares with the engine: three signs of the process, two rings."""

from __future__ import annotations

from typing import Any

from core.runtime.prediction.worker.ring import COUNTS, Ring

RING = 1 << 20  # bytes, for messages and for answers
SIGNS = 24  # bytes before the rings: three int64 written by the process
# it works; number of messages processed; 0 while it polls, else the number of times that it has gone to sleep
READY, DONE, ASLEEP = range(3)
SIZE = SIGNS + 2 * (COUNTS + RING)
LOOK_S = 2.5e-4  # polling interval of the process, and of a wait for it


def parts(memory: Any) -> tuple[memoryview, Ring, Ring]:
    """(signs, messages, answers) in `memory`: a buffer of SIZE bytes, all zero initially."""
    view, middle = memoryview(memory).cast("B"), SIGNS + COUNTS + RING
    return view[:SIGNS].cast("q"), Ring(view[SIGNS:middle]), Ring(view[middle:SIZE])
