"""One measurement in a fresh process: cold files, its own memory group, and optionally a limit."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from bench.cold import drop
from bench.limits import MemoryGroup
from bench.measure_protocol import Job
from core.errors import MoestroError

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 900.0  # before a process counts as hung


def measure(
    module: str,
    job: Job,
    files: Sequence[Path],
    python: str = sys.executable,
    limit: int | None = None,
    cold: bool = True,
) -> Job:
    """The answer of `python -m module` (see `bench.measure_protocol`) to a job, and what the system measured of it.

    `files` are dropped from the page cache before, if `cold`. With a `limit` in bytes the process may hold that much
    more than it held after its imports, page cache included: `limit_bytes` is the sum. `failed` has the reason if it
    did not answer. Raises MoestroError when a limit is requested and the system has none.
    """
    stayed = drop(files) if cold else None
    with ExitStack() as stack:
        group = stack.enter_context(MemoryGroup(job["kind"])) if limit is not None else None
        errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        process = stack.enter_context(
            subprocess.Popen(
                [python, "-m", module],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            )
        )
        stack.callback(process.kill)
        clock = threading.Timer(LONGEST_S, process.kill)
        clock.start()
        stack.callback(clock.cancel)
        idle = _ask(process, {**job, "group": str(group.path) if group else ""})
        seen: Job = {"stayed_cached": stayed, "idle_bytes": idle.get("rss")}
        if group is not None and limit is not None:
            seen["idle_bytes"] = group.used()
            seen["limit_bytes"] = seen["idle_bytes"] + limit
            group.hold_to(seen["limit_bytes"])
        found = _ask(process, {}) if idle else {}
        status = process.wait()
        if not found:
            seen["failed"] = _reason(status, errors, bool(group), clock)
        if group is not None:
            seen["charged_bytes"] = group.peak()
    return {**found, **seen}


def _ask(process: subprocess.Popen[str], words: Job) -> dict[str, Any]:
    """Sends a line and reads one; returns an empty dict when the process has ended."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    return dict(json.loads(line)) if line else {}


def _reason(status: int, errors: IO[str], limited: bool, clock: threading.Timer) -> str:
    if not clock.is_alive():
        return f"no answer within {LONGEST_S:.0f} s"
    if status == -9 and limited:
        return "ended by the system: it needs more memory than the limit"
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    return lines[-1] if lines else f"ended with status {status}"


def ended_well(found: Job, what: str) -> Job:
    """The answer; raises MoestroError when there is none."""
    if "failed" in found:
        raise MoestroError(f"{what} did not work: {found['failed']}")
    return found
