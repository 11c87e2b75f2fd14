"""A worker process for untrusted programs: one request at a time, within limits of time, memory and output.

The parent takes nothing from the worker but bytes, of a bounded number, and waits no longer than the limits allow,
whatever the worker does: it may never leave one call of C, reply with half a message, or die.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
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
INTERRUPTED = "was still running when it was no longer needed"

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
    """Beyond what the worker holds when it is ready."""
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
        self._usage: _Usage | None = None  # of the worker, once it is ready
        self._interrupts = 0  # calls of `interrupt`
        self._owners = dict[int, object]()
        self._holding = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The worker's process id while it runs."""
        worker = self._worker
        return None if worker is None else worker.pid

    def ask(self, request: bytes) -> bytes:
        """The worker's reply. Requests of several threads run one after the other.

        Raises Stopped when the worker exceeds a limit, breaks, or is interrupted; NotStarted.
        """
        before = self._interrupts
        with self._turn:
            if before != self._interrupts:
                raise Stopped(INTERRUPTED)
            with self._dropped_on_error():
                worker, usage = self._ready()
                most = self.limits.reply_bytes + 2 * len(request)
                try:
                    with self._watched(worker, usage) as beyond:
                        worker.pipe.send_bytes(request)
                        reply = worker.pipe.recv_bytes(most)
                except (EOFError, OSError) as error:
                    if before != self._interrupts:
                        raise Stopped(INTERRUPTED) from None
                    raise Stopped(beyond[0] if beyond else self._cause(worker, error, most)) from None
                if beyond:  # it was killed although it had just replied
                    raise Stopped(beyond[0])
                return reply

    def interrupt(self) -> None:
        """Stop every request made so far, which raises Stopped."""
        self._interrupts += 1
        if self._turn.locked():
            self._kill()

    def hold(self, owner: object) -> None:
        """Keep the worker, once it is started, until `release` is called for the same object."""
        with self._holding:
            self._owners[id(owner)] = owner

    def release(self, owner: object) -> None:
        """End the worker, unless another owner holds it. A later request would start it again."""
        with self._holding:
            self._owners.pop(id(owner), None)
            if not self._owners:
                self.interrupt()
                with self._turn:
                    self._drop()

    def start(self) -> None:
        """Start the worker if none runs, and return at once: a request then waits less for it."""
        if self._turn.acquire(blocking=False):  # otherwise a request runs, and so does the worker
            try:
                with suppress(NotStarted):  # as the request will say
                    self._started()
            finally:
                self._turn.release()

    def _started(self) -> WorkerProcess:
        """The worker, which may not be ready yet. Raises NotStarted."""
        worker = self._worker
        if self._usage is not None and worker is not None and (worker.pid is None or worker.pipe.poll()):
            self._drop()  # it died, or wrote without a request
        if self._worker is None:
            limits = self.limits
            try:
                self._worker = WorkerProcess(_serve, self._prepare, limits.memory_bytes, limits.wall_s, niceness=0)
            except OSError as error:
                raise NotStarted(str(error)) from error
            atexit.register(self._kill)
        return self._worker

    def _ready(self) -> tuple[WorkerProcess, _Usage]:
        """The worker, waiting for a request. Raises NotStarted."""
        worker = self._started()
        if self._usage is None:
            try:
                if not worker.pipe.poll(START_S):
                    raise NotStarted(f"it was not ready within {START_S:g} seconds")
                worker.pipe.recv_bytes(len(READY))
                pid = worker.pid
                if pid is None:
                    raise EOFError
                self._usage = _Usage(pid)
            except (EOFError, OSError, psutil.NoSuchProcess):
                raise NotStarted("it ended while it started") from None
        return worker, self._usage

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
            self._worker = self._usage = None
            atexit.unregister(self._kill)

    def _kill(self) -> None:
        """Kill the worker; also at exit, where multiprocessing asks its processes to end and waits until they do."""
        if (worker := self._worker) is not None:
            worker.kill()

    @contextmanager
    def _watched(self, worker: WorkerProcess, usage: _Usage) -> Iterator[list[str]]:
        """Within this context the worker is killed when it exceeds a limit. Gives a list for the reason, empty until
        then."""
        over, beyond, began_s = threading.Event(), list[str](), time.monotonic()

        def watch() -> None:
            if over.wait(LOOK_S):  # as of most requests, which cost no look
                return
            with suppress(psutil.NoSuchProcess):  # it ended, and its pipe is closed
                cpu_s = usage.cpu_s()
                while not over.wait(LOOK_S):
                    if why := self._beyond(usage.cpu_s() - cpu_s, time.monotonic() - began_s, usage.memory_bytes()):
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

    def _beyond(self, cpu_s: float, wall_s: float, memory_bytes: int) -> str:
        """The limit that is exceeded, in words, or ""."""
        limits = self.limits
        if cpu_s > limits.cpu_s:
            return f"did not end within {limits.cpu_s:g} seconds"
        if wall_s > limits.wall_s:
            return f"did not end within {limits.wall_s:g} seconds"
        return self._too_much_memory() if memory_bytes > limits.memory_bytes else ""

    def _too_much_memory(self) -> str:
        return f"takes more than {self.limits.memory_bytes >> 20} MiB of memory"

    def _cause(self, worker: WorkerProcess, error: Exception, most: int) -> str:
        """Why a worker gave no reply that was not killed."""
        if isinstance(error, OSError) and error.errno is None:  # recv_bytes: the message is longer than allowed
            return f"makes more than {most >> 20} MiB of text"
        if worker.end(patience_s=1.0) == OUT_OF_MEMORY:
            return self._too_much_memory()
        return "broke the process that ran it"


class _Usage:
    """What a worker that is ready uses. Raises psutil.NoSuchProcess."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ready_bytes = self._process.memory_info().rss

    def cpu_s(self) -> float:
        """Processor time so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        """Memory beyond that when it became ready."""
        return int(self._process.memory_info().rss - self._ready_bytes)


# ---------------------------------------------------------------------------------------------------- in the worker


def _serve(pipe: Connection, prepare: Callable[[], Answer], memory_bytes: int, wall_s: float) -> None:
    """Answer requests until the pipe is closed."""
    answer = prepare()
    gc.collect()
    gc.freeze()  # no collection looks at what was imported
    _limit_memory(memory_bytes)
    with open(os.devnull, "wb") as nowhere:
        pipe.send_bytes(READY)
        while True:
            request = pipe.recv_bytes()
            # When the parent is gone, this ends even a process in which a call of C holds Python's lock.
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
