"""The protocol between the bench and a measurement in its own process.

The bench sends a job; the process joins its memory group, imports what it needs and reports that it is idle; the bench
then knows its memory without a model and sets the limit. After that, each line that it sends is a request, which the
process measures and answers, until its input ends. Needs only the standard library, so that it also runs in the
interpreter that has other programs."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
STARTED_S = time.perf_counter()


def take_part(prepare: Callable[[Job], Callable[[Job], Job]]) -> None:
    """The main function of a measuring process. `prepare` imports for the job, and returns the function
    that measures what is requested."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the answers
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # nor come after the reason of a failure

    def say(found: Job) -> None:
        print(json.dumps(found), file=answers, flush=True)

    job = json.loads(sys.stdin.readline())
    if job.get("group"):
        (Path(job["group"]) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    measure = prepare(job)
    say({"idle": True, "rss": memory()["rss"]})
    for line in sys.stdin:
        found = measure(json.loads(line))
        say({**found, **{f"peak_{name}": value for name, value in memory().items()}, "read_bytes": read_bytes()})


def memory() -> dict[str, int]:
    """Bytes of this process in memory: now, and the peak so far. Not from getrusage, whose peak a child inherits."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        import psutil

        info = psutil.Process().memory_info()
        return {"rss": info.rss, "high": getattr(info, "peak_wset", info.rss)}
    fields = dict(line.split(":", 1) for line in lines)
    return {"rss": int(fields["VmRSS"].split()[0]) * 1024, "high": int(fields["VmHWM"].split()[0]) * 1024}


def own_bytes() -> int:
    """Bytes of this process's private memory now: without files it maps, such as libraries."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        import psutil

        info = psutil.Process().memory_info()
        return int(getattr(info, "private", info.rss))
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def children_bytes() -> int:
    """Bytes that processes which this one has started hold for themselves now."""
    import psutil

    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


class Highest:
    """The peak of `own_bytes` between creation and `stop`, sampled 200 times a second by a thread."""

    def __init__(self) -> None:
        self._most, self._over = own_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, own_bytes())

    def stop(self) -> int:
        """Stops sampling; returns the peak in bytes."""
        self._over.set()
        self._thread.join()
        return self._most


def read_bytes() -> int | None:
    """Bytes read from disk by this process so far; None where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
