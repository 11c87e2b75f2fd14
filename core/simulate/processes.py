"""Independent jobs over one trace: here, one after the other, or in fresh processes, as on Windows everywhere."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, TypeVar

from core.trace import FileTrace, Trace
from core.trace.file import save

Out = TypeVar("Out", covariant=True)


class Job(Protocol[Out]):
    """Something to do with a trace."""

    def run(self, trace: Trace) -> Out: ...


def here(jobs: Sequence[Job[Out]], trace: Trace) -> Iterator[tuple[int, Out]]:
    """(place in `jobs`, what it returned), in order."""
    for at, job in enumerate(jobs):
        yield at, job.run(trace)


def spread(jobs: Sequence[Job[Out]], trace: Trace, processes: int) -> Iterator[tuple[int, Out]]:
    """The same as they finish. The processes read the trace from disk, from a copy if it is not one of our files."""
    with tempfile.TemporaryDirectory(prefix="moestro-") as folder:
        ours = trace if isinstance(trace, FileTrace) else save(trace, Path(folder) / "copy.trace", packed=False)
        pool = ProcessPoolExecutor(min(processes, len(jobs)), get_context("spawn"), _quietly)
        try:
            waiting = {pool.submit(_work, str(ours.path), job): at for at, job in enumerate(jobs)}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _quietly() -> None:
    """A process that is stopped with Ctrl-C has nothing to say: its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _work(path: str, job: Job[Out]) -> Out:
    return job.run(FileTrace(Path(path)))
