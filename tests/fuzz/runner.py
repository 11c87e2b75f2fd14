"""Hands mutants to worker processes, ends the ones that hang, starts new ones, and collects the verdicts."""

import json
import os
import queue
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from core.system.limited_process import LimitedProcess, Limits, NotStarted, Stopped
from tests.fuzz.mutant import Mutant, Verdict
from tests.fuzz.worker import prepare

HANG_S = 20.0
MADE_S = 120.0  # samples are made once, which also imports all that is needed
BUSY = 5  # seconds of the clock for one of processor time, of both limits
MEMORY_BYTES, REPLY_BYTES = 8 << 30, 64 << 20
Asked = Mapping[str, Any]
"""A mutant as plain JSON, or {"kind", "seed"}."""
Verdicts = Generator[tuple[Mutant, Verdict], None, None]


class Worker:
    """One process, started when it is needed. `run` is called by one thread."""

    def __init__(self, folder: Path, hang_s: float = HANG_S) -> None:
        self._patient, self._limits = (Limits(s, BUSY * s, MEMORY_BYTES, REPLY_BYTES) for s in (MADE_S, hang_s))
        self._process = LimitedProcess(partial(prepare, str(folder)), self._patient)
        self._process.hold(self)

    def run(self, asked: Asked) -> tuple[Mutant, Verdict]:
        """What became of a mutant; a hang or a crash costs the process. Raises RuntimeError where the process does not
        get as far as the mutant."""
        try:
            mutant = Mutant.of(self._ask(self._patient, "make", asked))
        except (Stopped, NotStarted) as error:
            raise RuntimeError(f"The worker did not get as far as the mutant {dict(asked)}: it {error}") from error
        try:
            return mutant, Verdict(**self._ask(self._limits, "judge", mutant.plain()))
        except Stopped as stopped:
            return mutant, Verdict("hang" if "did not end" in str(stopped) else "crash", f"it {stopped}")

    def _ask(self, limits: Limits, what: str, value: Asked) -> dict[str, Any]:
        self._process.limits = limits
        reply = json.loads(self._process.ask(json.dumps([what, dict(value)]).encode()))
        if "fault" in reply:
            raise RuntimeError(reply["fault"])
        return dict(reply)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.release(self)


def run_all(asked: Iterable[Asked], workers: int = 2, hang_s: float = HANG_S) -> Verdicts:
    """Verdicts as they come, in any order. `asked` is read as it is needed, so it may be endless; closing the iterator
    ends all processes."""
    source, running, free = iter(asked), set[Future[tuple[Mutant, Verdict]]](), queue.SimpleQueue[Worker]()

    def run(one: Asked) -> tuple[Mutant, Verdict]:
        worker = free.get()
        try:
            return worker.run(one)
        finally:
            free.put(worker)

    with (
        tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        made = [Worker(Path(folder) / str(number), hang_s) for number in range(workers)]
        for worker in made:
            free.put(worker)
        try:
            while True:
                running |= {pool.submit(run, one) for one in islice(source, workers - len(running))}
                if not running:
                    return
                done, running = wait(running, 1.0, FIRST_COMPLETED)  # without an end Windows would not see Ctrl-C
                for future in done:
                    yield future.result()
        finally:
            for worker in made:
                worker.close()


def cores() -> int:
    return max(1, min(4, os.cpu_count() or 1))


def each(kinds: Iterable[str], seeds: Iterable[int]) -> Iterator[Asked]:
    """All kinds in turn, a seed each."""
    names = list(kinds)
    for number, seed in enumerate(seeds):
        yield {"kind": names[number % len(names)], "seed": seed}
