"""A worker process for programs that nobody trusts: one request at a time, within limits of time, memory and output.

The parent takes nothing from the worker but bytes, of a bounded number, and waits no longer than the limits allow,
whatever the worker does: it may never leave one call of C, reply with half a message, or die.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil

from core.system.worker_process import WorkerProcess

LOOK_S = 0.05  # between two looks at what a request has used
START_S = 120.0  # a worker takes a second or two to import what it needs, and far longer on a busy machine
OUT_OF_MEMORY = 77  # exit status
READY = b"ready"
ENDED = "was still running when the model was unloaded"

Answer = Callable[[bytes], bytes]


class Stopped(Exception):
    """The program exceeded a limit or broke its process. The text says what it did, to follow the word "it"."""


class NotStarted(Exception):
    """No worker process can be started. The text says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may use."""

    cpu_s: float
    """Processor time: a busy machine stops no program that waits for its turn."""
    wall_s: float
    """A far backstop, for a worker that sleeps."""
    memory_bytes: int
    """Beyond what the worker holds when the request begins."""
    reply_bytes: int
    """Beyond twice the size of the request."""


class LimitedProcess:
    """Runs requests in one worker process, which the first request starts and later ones use again. A worker that
    exceeds a limit is killed, and the next request starts another. Any thread may call any method.
    """

    def __init__(self, prepare: Callable[[], Answer], limits: Limits) -> None:
        """`prepare` is a function of a module, which the worker imports; it returns the function that answers a
        request."""
        self.limits = limits
        self._prepare = prepare
        self._turn = threading.Lock()  # held while a request runs
        self._worker: WorkerProcess | None = None
        self._is_ready = False  # the worker has imported what it needs
        self._ends = 0  # calls of `end`

    @property
    def pid(self) -> int | None:
        """The worker's process id while it runs."""
        worker = self._worker
        return None if worker is None else worker.pid

    def ask(self, request: bytes) -> bytes:
        """The worker's reply. Requests of several threads run one after the other.

        Raises Stopped when the worker exceeds a limit, breaks, or is ended by `end`; NotStarted.
        """
        ends = self._ends
        with self._turn, self._dropped_on_error():
            if ends != self._ends:
                raise Stopped(ENDED)
            worker, most = self._ready(), self.limits.reply_bytes + 2 * len(request)
            try:
                with self._watched(worker) as beyond:
                    worker.pipe.send_bytes(request)
                    reply = worker.pipe.recv_bytes(most)
            except (EOFError, OSError) as error:
                if ends != self._ends:
                    raise Stopped(ENDED) from None
                raise Stopped(beyond[0] if beyond else self._cause(worker, error, most)) from None
            if beyond:  # it was killed although it had just replied
                raise Stopped(beyond[0])
            return reply

    def end(self) -> None:
        """End the worker and every request made so far, which raises Stopped. A later request starts another worker."""
        self._ends += 1
        self._kill()
        with self._turn:
            self._drop()

    def start(self) -> None:
        """Start the worker if none runs, and return at once: a request then waits less for it, or raises NotStarted."""
        if self._turn.acquire(blocking=False):  # otherwise a request runs, and so does the worker
            try:
                with suppress(NotStarted):
                    self._started()
            finally:
                self._turn.release()

    def _started(self) -> WorkerProcess:
        """The worker, which may not be ready yet. Raises NotStarted."""
        if self._worker is not None and self._worker.pid is None:  # it died between two requests
            self._drop()
        if self._worker is None:
            limits = self.limits
            try:
                self._worker = WorkerProcess(_serve, self._prepare, limits.memory_bytes, limits.wall_s, niceness=0)
            except OSError as error:
                raise NotStarted(str(error)) from error
            self._is_ready = False
            atexit.register(self._kill)
        return self._worker

    def _ready(self) -> WorkerProcess:
        """The worker, waiting for a request. Raises NotStarted."""
        worker = self._started()
        if not self._is_ready:
            try:
                if not worker.pipe.poll(START_S):
                    raise NotStarted(f"it was not ready within {START_S:g} seconds")
                worker.pipe.recv_bytes(len(READY))
            except (EOFError, OSError):
                raise NotStarted("it ended while it started") from None
            self._is_ready = True
        return worker

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """A worker whose reply was not read, whatever the reason, gets no other request."""
        try:
            yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.end()
            self._worker = None
            atexit.unregister(self._kill)

    def _kill(self) -> None:
        """Kill the worker; also at exit, where multiprocessing asks its processes to end and waits until they do."""
        if (worker := self._worker) is not None:
            worker.kill()

    @contextmanager
    def _watched(self, worker: WorkerProcess) -> Iterator[list[str]]:
        """Within this context the worker is killed when it exceeds a limit. Gives a list for the reason, empty until
        then."""
        over, beyond = threading.Event(), list[str]()

        def watch() -> None:
            pid = worker.pid
            if pid is None:
                return
            with suppress(psutil.NoSuchProcess):  # it ended, and its pipe is closed
                use = _Use(psutil.Process(pid), self.limits)
                while not over.wait(LOOK_S):
                    if why := use.beyond():
                        beyond.append(why)
                        worker.kill()
                        return

        watching = threading.Thread(target=watch, name="moestro-limits", daemon=True)
        watching.start()
        try:
            yield beyond
        finally:
            over.set()
            watching.join()

    def _cause(self, worker: WorkerProcess, error: Exception, most: int) -> str:
        """Why a worker gave no reply that was not killed."""
        if isinstance(error, OSError) and error.errno is None:  # recv_bytes: the message is longer than allowed
            return f"makes more than {most >> 20} MiB of text"
        if worker.end(patience_s=1.0) == OUT_OF_MEMORY:
            return _too_much_memory(self.limits)
        return "broke the process that ran it"


class _Use:
    """What a request has used since this object was made."""

    def __init__(self, process: psutil.Process, limits: Limits) -> None:
        self._process, self._limits = process, limits
        self._began_s, self._cpu_s, self._rss = time.monotonic(), self._cpu(), process.memory_info().rss

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def beyond(self) -> str:
        """The limit that was exceeded, in words; "" if none was. Raises psutil.NoSuchProcess."""
        limits = self._limits
        if self._cpu() - self._cpu_s > limits.cpu_s:
            return f"did not end within {limits.cpu_s:g} seconds"
        if time.monotonic() - self._began_s > limits.wall_s:
            return f"did not end within {limits.wall_s:g} seconds"
        if self._process.memory_info().rss - self._rss > limits.memory_bytes:
            return _too_much_memory(limits)
        return ""


def _too_much_memory(limits: Limits) -> str:
    return f"takes more than {limits.memory_bytes >> 20} MiB of memory"


# ---------------------------------------------------------------------------------------------------- in the worker


def _serve(pipe: Connection, prepare: Callable[[], Answer], memory_bytes: int, wall_s: float) -> None:
    """Answer requests until the pipe is closed."""
    answer = prepare()
    _limit_memory(memory_bytes)
    with open(os.devnull, "wb") as nowhere:
        pipe.send_bytes(READY)
        while True:
            request = pipe.recv_bytes()
            # Where the parent is no longer there to do so, this ends a process in which a call of C holds Python's lock.
            faulthandler.dump_traceback_later(2 * wall_s, exit=True, file=nowhere)
            try:
                reply = answer(request)
                faulthandler.cancel_dump_traceback_later()
                pipe.send_bytes(reply)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)


def _limit_memory(more_bytes: int) -> None:
    """Let allocations fail beyond `more_bytes` from now on. Where the system cannot, the parent's look has to do."""
    if sys.platform == "win32":
        return
    import resource

    most = psutil.Process().memory_info().vms + more_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
