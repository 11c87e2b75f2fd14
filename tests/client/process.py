"""The real server in a process of its own, with its own data folder."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from core.errors import MoestroError
from tests.client.page import Failed, Http

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, str(ROOT / "launch.py"))
START_S, END_S = 180.0, 60.0


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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
