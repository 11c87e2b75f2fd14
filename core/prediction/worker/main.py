"""The process in which a predictor's worker lives (see `apart`). It imports no more than numpy and the policies.

Argument: the word for the shared memory. On stdin: the task, as one message; then a byte to wake it. While there is
something to do it looks often by itself, for to wake it takes the computing thread longer than all else that it does
for it. Where stdin ends, so does it, however the application ended.
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
NICE = 5  # what comes late is of no use, so it does not give way to everything on the machine
QUIET_S = 0.05  # without a message, after which it sleeps


def main(word: str) -> None:
    """The life of the process."""
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
                answers.put(answer)  # nobody takes them where there is no room
            signs[DONE] += 1
            busy_s = time.monotonic()
        if signs[ASLEEP]:
            awake = os.read(sys.stdin.fileno(), BYTES)
        elif time.monotonic() - busy_s > QUIET_S:
            signs[ASLEEP] = 1  # and one more look, for what came just now
        else:
            time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
