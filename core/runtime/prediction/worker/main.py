"""What the predictor's worker process does (see `process_worker`). Imports no more than numpy and the policies.

Its pipe brings the task, and then a message to wake it. While there is work it polls, because waking it costs the
compute thread more time than everything else it does for the worker. Through the pipe it announces each answer.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from core.policy.predict.workers import make_worker
from core.runtime.prediction.worker.memory import ASLEEP, DONE, LOOK_S, READY, parts

QUIET_S = 0.05  # without a message before it sleeps


def serve(pipe: Connection, memory: Any) -> None:
    """The main loop of the process; `memory` as in `core.runtime.prediction.worker.memory`."""
    signs, messages, answers = parts(memory)
    worker = make_worker(pipe.recv())
    signs[READY], busy_s, sleeps = 1, time.monotonic(), 0
    while True:
        while (message := messages.get()) is not None:
            signs[ASLEEP] = 0
            answer = worker.work(message)
            there = bool(answer) and answers.put(answer)  # dropped when the ring is full
            signs[DONE] += 1
            if there:
                pipe.send_bytes(b"\0")
            busy_s = time.monotonic()
        if signs[ASLEEP]:
            pipe.recv_bytes()
            signs[ASLEEP], busy_s = 0, time.monotonic()
        elif time.monotonic() - busy_s > QUIET_S:
            sleeps += 1
            signs[ASLEEP] = sleeps  # polls once more for messages that have just come
        else:
            time.sleep(LOOK_S)
