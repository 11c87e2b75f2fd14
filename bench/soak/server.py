"""The server under test, and its resources."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from app.client.page import Failed
from app.client.process import Server


class ProcessUse(NamedTuple):
    """Resources of one process. `own`: bytes of memory not backed by files, where the system tells, else not shared
    with other processes, including libraries' code; `rss`: resident bytes. `handles`: open descriptors, on Windows
    handles."""

    own: int
    rss: int
    handles: int
    threads: int


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Resources of the server and of each of its child processes, by process id, at one moment; `database` in bytes.
    `model`: the one that is loaded, as the server names it, "" for none."""

    seconds: float
    model: str
    server: ProcessUse
    children: Mapping[int, ProcessUse]
    database: int

    @property
    def together(self) -> ProcessUse:
        """The sum over all processes."""
        return ProcessUse(*map(sum, zip(self.server, *self.children.values(), strict=True)))


def used_by(process: psutil.Process) -> ProcessUse | None:
    """What it has now; None where it has ended."""
    try:
        memory = process.memory_info()
        own = memory.rss - memory.shared if hasattr(memory, "shared") else process.memory_full_info().uss
        handles = process.num_fds() if hasattr(process, "num_fds") else getattr(process, "num_handles", int)()
        return ProcessUse(own, memory.rss, handles, process.num_threads())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None


class MeasuredServer(Server):
    """A server whose resources and database can be looked at while it runs."""

    def __init__(self, home: Path) -> None:
        self._began = time.monotonic()
        super().__init__(home)

    def held(self) -> ResourceUse | None:
        """Its resources now; None when it has died."""
        try:
            server = psutil.Process(self.process.pid)
            children = {one.pid: used_by(one) for one in server.children(recursive=True)}
        except psutil.NoSuchProcess:
            return None
        own = used_by(server)
        if own is None:
            return None
        there = {pid: use for pid, use in children.items() if use is not None}
        return ResourceUse(time.monotonic() - self._began, self._loaded(), own, there, self.database())

    def _loaded(self) -> str:
        try:
            return str(self.http.json("/healthz")["model"] or "")
        except (Failed, ValueError):
            return ""

    def database(self) -> int:
        """Bytes of the database, including its log."""
        return sum(file.stat().st_size for file in self.home.glob("moestro.sqlite3*") if file.exists())

    def recorded(self) -> tuple[int, int]:
        """Forward passes recorded, which is tokens except for prompts, and the bytes they all take."""
        with closing(sqlite3.connect(f"{(self.home / 'moestro.sqlite3').as_uri()}?mode=ro", uri=True)) as db:
            (passes,) = db.execute("SELECT coalesce(max(id), 0) FROM steps").fetchone()
        return int(passes), self.database()
