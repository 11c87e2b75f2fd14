"""The server under test: the real one, in a separate process with its own data folder; its resources and its log."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bench.soak.page import Failed, Http
from core.errors import MoestroError

ROOT = Path(__file__).resolve().parents[2]
START_S, END_S = 180.0, 60.0


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Resources of the server and its child processes at one moment. `own`: memory not backed by files, where the
    system tells, else memory not shared with other processes, including libraries' code. `handles`: open descriptors,
    on Windows handles."""

    seconds: float
    rss: int
    own: int
    handles: int
    threads: int
    processes: int
    database: int


class Server:
    """Starts at once; a context manager that ends it like Ctrl-C. Raises MoestroError when it does not start."""

    def __init__(self, home: Path, arguments: Sequence[str] = ("--model", "demo")) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.home, self.log, self.url = home, home / "server.log", f"http://127.0.0.1:{self.port}"
        self.http = Http(self.url)
        self._arguments = arguments
        self._began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Returns when the model is loaded."""
        command = [sys.executable, str(ROOT / "launch.py"), "ui", "--no-browser", "--port", str(self.port)]
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                [*command, *self._arguments],
                cwd=ROOT,
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
        found = (0, 0, 0, 0, 0)
        try:
            server = psutil.Process(self.process.pid)
            everybody = [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        for one in everybody:
            try:
                memory = one.memory_info()
                own = memory.rss - memory.shared if hasattr(memory, "shared") else one.memory_full_info().uss
                handles = one.num_fds() if hasattr(one, "num_fds") else getattr(one, "num_handles", int)()
                now = (memory.rss, own, handles, one.num_threads(), 1)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # a child that has just ended
            found = tuple(a + b for a, b in zip(found, now, strict=True))  # type: ignore[assignment]
        rss, own, handles, threads, processes = found
        return ResourceUse(time.monotonic() - self._began, rss, own, handles, threads, processes, self.database())

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
