"""Runs independent jobs over one trace: in this process, one after the other, or in spawned processes
(on every system)."""

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


class TraceJob(Protocol[Out]):
    """Something to compute from a trace."""

    def run(self, trace: Trace) -> Out: ...


def here(jobs: Sequence[TraceJob[Out]], trace: Trace) -> Iterator[tuple[int, Out]]:
    """Runs the jobs here; yields (index in `jobs`, result) in order."""
    for at, job in enumerate(jobs):
        yield at, job.run(trace)


def spread(jobs: Sequence[TraceJob[Out]], trace: Trace, processes: int) -> Iterator[tuple[int, Out]]:
    """Runs the jobs in `processes` processes; yields (index, result) as they finish. The processes read the trace from
    disk, from a temporary copy unless it is a FileTrace."""
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
    """Lets Ctrl-C end a worker process without a traceback: the parent reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _work(path: str, job: TraceJob[Out]) -> Out:
    return job.run(FileTrace(Path(path)))
