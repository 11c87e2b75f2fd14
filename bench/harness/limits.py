"""A hard limit on the memory of a process, its page cache included: a Linux control group.

A memory-mapped model lives in the page cache, which nothing else limits: RLIMIT_RSS does nothing, RLIMIT_AS counts
addresses. Without a control group (other systems, missing rights) there is no such limit, and `MemoryGroup` says why.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from core.errors import MoestroError

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Files:
    """Where groups are created, and the names of their files in this version of control groups."""

    parent: Path
    limit: str
    swap_limit: str  # v1: memory and swap together; v2: swap alone
    used: str
    peak: str


def files(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Files:
    """Version 1: the group is inside this process's own, under its limits; version 2: beside it, since a group with
    processes cannot have children with limits. Raises MoestroError when there are no control groups."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        raise MoestroError("This system has no control groups.") from None
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Files(
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
    return Files(parent, "memory.max", "memory.swap.max", "memory.current", "memory.peak")


class MemoryGroup:
    """A control group for one process, without a limit until `hold_to`. Use as a context manager."""

    def __init__(self, name: str, where: Files | None = None) -> None:
        self._files = where or files()
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

    def hold_to(self, size_bytes: int) -> None:
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
