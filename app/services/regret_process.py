"""The process that runs the shadow caches next to the engine: the application's side of it, and its own.

It answers each message of its pipe and ends when that closes. It runs at the lowest priority and imports only numpy and
the simulator."""

import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from core.system.worker_process import WorkerProcess

Head = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]
GONE_S = 2.0


class Lost(Exception):
    """The process ended, could not be started, or failed a request. The message is for the log."""


class Process:
    """One running process. Call `ask` from one thread; `kill` from any, which makes a waiting `ask` raise Lost."""

    def __init__(self) -> None:
        """Raises Lost when it cannot be started."""
        try:
            self._worker = WorkerProcess(serve)
        except OSError as error:
            raise Lost(f"it could not be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._worker.pid

    def ask(self, head: Head, arrays: Arrays | None = None) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises Lost."""
        try:
            self._worker.pipe.send((head, arrays or {}))
            answer: dict[str, Any] = self._worker.pipe.recv()
        except (OSError, EOFError) as error:  # OSError also when the pipe has just been closed
            raise Lost(f"it ended ({type(error).__name__} {error})") from error
        if answer["problem"]:
            raise Lost(answer.get("details") or answer["problem"])
        return answer

    def kill(self) -> None:
        """Kill it now; `end` reaps it."""
        self._worker.kill()

    def end(self) -> None:
        """End it if it still runs, and release its resources. A second call does nothing."""
        self._worker.end(GONE_S)


# -- in the process ---------------------------------------------------------------------------------------------------


class ShadowServer:
    """Handles messages: `setup` creates new shadow caches, `forget` resets the counts, arrays are passes, `report`
    requests figures."""

    def __init__(self) -> None:
        from core.profile.trace import Chunk
        from core.settings.registry import variants
        from core.simulate import regret

        self._regret, self._chunk, self._variants = regret, Chunk, variants
        self._shadows: Any = None

    def answer(self, head: Head, arrays: Arrays) -> dict[str, Any]:
        """The reply: `problem` is "" on success, `report` the figures when requested and available."""
        started_s = time.perf_counter()
        if "setup" in head:
            known = {variant.name for variant in self._variants("eviction")}  # without policies of user-defined modules
            policies = {name: values for name, values in head["setup"]["policies"].items() if name in known}
            setup = self._regret.Setup(**{**head["setup"], "policies": policies})
            self._shadows = self._regret.Shadows(setup, head["window"])
        if head.get("forget"):
            self._shadows.forget()
        if arrays:
            sizes = arrays["sizes"]
            chunk = self._chunk(arrays["ids"], sizes, arrays["decode"], np.zeros(len(sizes), np.int32))
            if head.get("warm"):
                self._shadows.warm(chunk)
            else:
                self._shadows.feed(chunk, arrays["hits"], arrays["requests"])
        report = self._shadows.report() if head.get("report") else None
        return {
            "problem": "",
            "report": asdict(report) if report is not None else None,
            "spent_s": time.perf_counter() - started_s,
        }


def serve(pipe: Connection) -> None:
    """Main loop of the process."""
    server = ShadowServer()
    while True:
        head, arrays = pipe.recv()
        try:
            answer = server.answer(head, arrays)
        except Exception as error:
            answer = {"problem": str(error) or type(error).__name__, "details": traceback.format_exc()}
        pipe.send(answer)
