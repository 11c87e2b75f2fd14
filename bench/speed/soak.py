"""bench soak: does the server leak, slow down or fail under load? The clients and the server are in `bench/soak`."""

from __future__ import annotations

from bench import soak
from bench.harness.run import Result, Run, Suite


def measure(run: Run, minutes: float = 60.0, seed: int = 1) -> Result:
    return soak.run(minutes, seed, run.small, run.so_far, run.say)


SUITE = Suite(measure, lambda result: soak.table(result).splitlines())
