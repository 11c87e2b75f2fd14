"""The server under test: the real one, in a separate process with its own data folder; its resources and its log."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from bench.soak.page import Failed, Http
from core.errors import MoestroError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, str(ROOT / "launch.py"))
START_S, END_S = 180.0, 60.0


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


class Server:
    """Starts `program` at once, in `folder`; a context manager that ends it like Ctrl-C. Raises MoestroError when it
    does not start."""

    def __init__(
        self,
        home: Path,
        arguments: Sequence[str] = ("--model", "demo"),
        program: Sequence[str] = PROGRAM,
        folder: Path = ROOT,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.home, self.log, self.url = home, home / "server.log", f"http://127.0.0.1:{self.port}"
        self.http = Http(self.url)
        self._program, self._arguments, self._folder = program, arguments, folder
        self._began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Returns when the model is loaded."""
        command = [*self._program, "ui", "--no-browser", "--port", str(self.port)]
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                [*command, *self._arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "MOESTRO_HOME": str(self.home)},
                **apart,
            )
        end = time.monotonic() + START_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise MoestroError(f"The server did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self.http.json("/healthz")["model"] is not None
        except (Failed, ValueError):
            return False

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

    def complaints(self) -> list[str]:
        """What it has logged after its greeting."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("Moestro is ready")]

    def kill(self) -> None:
        """Kills it and its children, as in a crash."""
        try:
            everybody = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            everybody = []
        self.process.kill()
        self.process.wait()
        for one in everybody:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass

    def end(self) -> str:
        """Ends it like Ctrl-C; returns what went wrong, or ""."""
        if self.process.poll() is not None:
            return f"the server had ended with status {self.process.returncode}"
        self.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"the server did not end within {END_S:.0f} s"
        return f"the server ended with status {status}" if os.name == "posix" and status else ""

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
