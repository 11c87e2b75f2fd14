"""One measurement in a process of its own: files out of the page cache, its own memory group, and a limit if asked.

The limit is a Linux control group, page cache included. A memory-mapped model lives in the page cache, which nothing
else limits: RLIMIT_RSS does nothing, RLIMIT_AS counts addresses. Without a control group (other systems, missing
rights) there is no such limit, and `MemoryGroup` says why."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.harness.protocol import Job
from core.errors import MoestroError

ROOT = Path(__file__).resolve().parents[2]
GROUPS = Path("/sys/fs/cgroup")
LONGEST_S = 900.0  # before a process counts as hung
METHOD = "posix_fadvise(DONTNEED) on every file of the model before every run, checked with mincore"
NO_METHOD = "none: this system has no posix_fadvise, so files may come from the page cache"


class Session:
    """`python -m module` (see `bench.harness.protocol`) with one job, idle after its imports, which then answers
    requests. Use as a context manager, which ends it.

    With a `limit` in bytes the process may hold that much more than it held after its imports, page cache included.
    `seen` has `idle_bytes`, what it held then, and `limit_bytes`, the sum."""

    def __init__(self, module: str, job: Job, python: str = sys.executable, limit: int | None = None) -> None:
        """Raises MoestroError where it does not start, or where a limit is requested and the system has none."""
        self._limited, self._stack = limit is not None, ExitStack()
        with ExitStack() as undo:
            self._group = undo.enter_context(MemoryGroup(job.get("kind", "bench"))) if limit is not None else None
            self._errors = undo.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            self._process = undo.enter_context(
                subprocess.Popen(
                    [python, "-m", module],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    encoding="utf-8",
                )
            )
            undo.callback(self._process.kill)
            idle = self.ask(**job, group=str(self._group.path) if self._group else "")
            self.seen: Job = {"idle_bytes": idle["rss"]}
            if self._group is not None and limit is not None:
                held = self._group.used()
                self.seen = {"idle_bytes": held, "limit_bytes": held + limit}
                self._group.limit_to(held + limit)
            self._stack = undo.pop_all()

    def ask(self, **request: Any) -> Job:
        """Its answer to a request. Raises MoestroError with the reason where it ends without one."""
        assert self._process.stdin and self._process.stdout
        clock = threading.Timer(LONGEST_S, self._process.kill)
        clock.start()
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MoestroError(self._reason(self._process.wait(), clock))
        clock.cancel()
        return dict(json.loads(line))

    def charged_bytes(self) -> int | None:
        """Most bytes that its memory group was charged with; None without a limit, and where the system does not
        say."""
        return self._group.peak() if self._group else None

    def _reason(self, status: int, clock: threading.Timer) -> str:
        if not clock.is_alive():
            return f"no answer within {LONGEST_S:.0f} s"
        clock.cancel()
        if status == -9 and self._limited:
            return "ended by the system: it needs more memory than the limit"
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"ended with status {status}"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def measure(
    module: str,
    job: Job,
    files: Sequence[Path],
    python: str = sys.executable,
    limit: int | None = None,
    request: Job | None = None,
) -> Job:
    """The answer of a session to one request, and what the system measured of it. `files` are dropped from the page
    cache before. `failed` has the reason if it did not answer. Raises MoestroError when a limit is requested and the
    system has none."""
    stayed = drop(files)
    with Session(module, job, python, limit) as session:
        try:
            found = session.ask(**(request or {}))
        except MoestroError as error:
            found = {"failed": str(error)}
        return {**found, **session.seen, "stayed_cached": stayed, "charged_bytes": session.charged_bytes()}


def ended_well(found: Job, what: str) -> Job:
    """The answer; raises MoestroError when there is none."""
    if "failed" in found:
        raise MoestroError(f"{what} did not work: {found['failed']}")
    return found


def drop(paths: Iterable[Path]) -> int | None:
    """Drops the pages of these files, and of all files in these directories; returns the bytes that stayed cached
    (because another process maps them). None: this system cannot tell, and nothing was dropped."""
    if not hasattr(os, "posix_fadvise"):
        return None
    stayed = 0
    for file in _all_files(paths):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(handle)  # dirty pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            stayed += cached(handle)
        finally:
            os.close(handle)
    return stayed


def cached(handle: int) -> int:
    """Bytes of an open file that are in the page cache (mincore on a map of it, which reads no pages)."""
    size = os.fstat(handle).st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = -(-size // mmap.PAGESIZE)
    flags = ctypes.create_string_buffer(pages)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if libc.mincore(address, size, flags):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(address, size)
    return sum(byte & 1 for byte in flags.raw) * mmap.PAGESIZE


def _all_files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        yield from (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


# ---------------------------------------------------------------------- a limit of memory


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """Where groups are created, and the names of their files in this version of control groups."""

    parent: Path
    limit: str
    swap_limit: str  # v1: memory and swap together; v2: swap alone
    used: str
    peak: str


def group_files(root: Path = GROUPS, own: Path = Path("/proc/self/cgroup")) -> GroupFiles:
    """Version 1: the group is inside this process's own, under its limits; version 2: next to it, since a group with
    processes cannot have children with limits. Raises MoestroError when there are no control groups."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        raise MoestroError("This system has no control groups.") from None
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return GroupFiles(
                root / "memory" / path.lstrip("/"),
                "memory.limit_in_bytes",
                "memory.memsw.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.max_usage_in_bytes",
            )
    group = root / next((path for number, _, path in lines if number == "0"), "").lstrip("/")
    parent = group if group == root else group.parent
    if "memory" not in _text(parent / "cgroup.subtree_control").split():
        raise MoestroError(f"The control group {parent} does not pass the memory controller on.")
    return GroupFiles(parent, "memory.max", "memory.swap.max", "memory.current", "memory.peak")


class MemoryGroup:
    """A control group for one process, without a limit until `limit_to`. Use as a context manager."""

    def __init__(self, name: str, where: GroupFiles | None = None) -> None:
        self._files = where or group_files()
        self.path = self._files.parent / f"moestro-{os.getpid()}-{name}"

    def __enter__(self) -> MemoryGroup:
        with ExitStack() as undo:
            try:
                self.path.mkdir()
                undo.callback(self.close)
                (self.path / self._files.limit).read_text(encoding="ascii")
            except OSError as error:
                raise MoestroError(f"A control group that limits memory cannot be made here ({error}).") from None
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def limit_to(self, size_bytes: int) -> None:
        """Sets the limit: page cache is reclaimed first, and a process that needs more is killed by the system."""
        (self.path / self._files.limit).write_text(str(size_bytes), encoding="ascii")
        swap = self.path / self._files.swap_limit
        if swap.exists():
            swap.write_text(str(size_bytes if "memsw" in swap.name else 0), encoding="ascii")

    def used(self) -> int:
        """Bytes charged to the group now: memory of its processes and page cache of files they read."""
        return int(_text(self.path / self._files.used) or 0)

    def peak(self) -> int | None:
        """Most bytes ever charged; None where the system does not say."""
        return int(_text(self.path / self._files.peak) or 0) or None

    def close(self) -> None:
        """Removes the group; its process has ended. Idempotent."""
        for _ in range(100):
            try:
                return self.path.rmdir()
            except FileNotFoundError:
                return None
            except OSError:
                time.sleep(0.02)  # the system takes a moment to release ended processes
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
