"""Runs independent jobs over one trace: in this process, one after the other, or in others."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from core.profile.trace import FileTrace, Trace
from core.profile.trace.file import save
from core.system import tasks

Out = TypeVar("Out", covariant=True)


class TraceJob(Protocol[Out]):
    """Something to compute from a trace."""

    def run(self, trace: Trace) -> Out: ...


def run(jobs: Sequence[TraceJob[Out]], trace: Trace, processes: int) -> Iterator[tuple[int, Out]]:
    """Runs the jobs in `processes` processes, 1 = in this one; yields (index in `jobs`, result) as they finish. Other
    processes read the trace from disk, from a temporary copy unless it is a FileTrace."""
    if processes == 1 or len(jobs) == 1:
        yield from ((at, job.run(trace)) for at, job in enumerate(jobs))
        return
    with tempfile.TemporaryDirectory(prefix="moestro-") as folder:
        ours = trace if isinstance(trace, FileTrace) else save(trace, Path(folder) / "copy.trace", packed=False)
        yield from tasks.run([tasks.Task(_work, (str(ours.path), job)) for job in jobs], processes)


def _work(path: str, job: TraceJob[Out]) -> Out:
    return job.run(FileTrace(Path(path)))
