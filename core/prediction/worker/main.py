"""Entry point of the predictor's worker process (see `process_worker`). Imports no more than numpy and the policies.

Argument: the handle of the shared memory. On stdin: the task, as one message; then a byte to wake it. While there is
work it polls, because waking it costs the compute thread more time than everything else it does for the worker. The
process ends when stdin closes, however the application ended.
"""

from __future__ import annotations

import os
import sys
import time

from core.policy.predict.aside import Task
from core.policy.predict.workers import make_worker
from core.prediction.worker.messages import read
from core.prediction.worker.process import behave
from core.prediction.worker.process_worker import ASLEEP, DONE, LOOK_S, READY, SIZE, parts
from core.prediction.worker.ring import join

BYTES = 4096
NICE = 5  # late results are useless, so the priority is only moderately lowered
QUIET_S = 0.05  # without a message before it sleeps


def main(word: str) -> None:
    """The main loop of the process."""
    behave(NICE)
    memory = join(word, SIZE)
    signs, messages, answers = parts(memoryview(memory))
    try:
        head, arrays = read(sys.stdin.buffer)
    except EOFError:
        return
    worker = make_worker(Task(head["task"], head["told"], arrays))
    signs[READY], busy_s, awake = 1, time.monotonic(), b"\0"
    while awake:
        while (message := messages.get()) is not None:
            signs[ASLEEP] = 0
            if answer := worker.work(message):
                answers.put(answer)  # dropped when the ring is full
            signs[DONE] += 1
            busy_s = time.monotonic()
        if signs[ASLEEP]:
            awake = os.read(sys.stdin.fileno(), BYTES)
        elif time.monotonic() - busy_s > QUIET_S:
            signs[ASLEEP] = 1  # polls once more for messages that have just come
        else:
            time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
