"""One more Python process for the application, with a pipe to it: for work that must not share Python's lock or a
device with the computation.

Processes are spawned, on every system: they inherit no device context, no thread and no file of this one. They end with
the application, however that ends.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process
from types import ModuleType
from typing import Any

import psutil

LOW = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # no idle threads of numpy
SPAWN = get_context("spawn")
_starting = threading.Lock()


class WorkerProcess:
    """A process that runs `work(pipe, *arguments)` and ends when that returns or finds its pipe closed.

    `work` is a function of a module, which the process imports; the arguments are small (larger ones go through the
    pipe) and, like messages, are pickled. `pipe` may be used by one thread at a time to send, and by one to receive;
    everything else by any.
    """

    def __init__(self, work: Callable[..., object], *arguments: Any, niceness: int = 19) -> None:
        """`niceness`: at least so nice, where the system has degrees (19: the lowest priority); 0: as the
        application. Raises OSError."""
        self.pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_begin, args=(work, theirs, niceness, arguments), daemon=True)
        self._ending, self._ended = threading.Lock(), False
        try:
            with _starting, _bare():
                self._process.start()
        except OSError:
            self.pipe.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        with self._ending:
            if self._ended or connection.wait([self._process.sentinel], 0):
                return None
            return self._process.pid

    def kill(self) -> None:
        """Kill it now, which ends a wait for its answer; `end` reaps it."""
        with suppress(OSError, ValueError):
            self._process.kill()

    def end(self, patience_s: float = 0.0) -> int | None:
        """Close the pipe, kill the process if it has not ended within `patience_s`, and wait for its end. Returns its
        exit status, None where another part of the program has waited for it. A second call does nothing.
        """
        with self._ending:
            if self._ended:
                return None
            self._ended = True
            self.pipe.close()
            self._process.join(patience_s)
            self.kill()
            self._process.join()
            status = self._process.exitcode
            with suppress(ValueError):  # another part has waited for it, and multiprocessing thinks that it runs
                self._process.close()
            return status


@contextmanager
def _bare() -> Iterator[None]:
    """Start a process without the application's main module: spawning would import that again, and a script that loads
    a model outside of `if __name__ == "__main__"` would load it once more.
    """
    main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in LOW}
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(LOW)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin(work: Callable[..., object], pipe: connection.Connection, niceness: int, arguments: tuple[Any, ...]) -> None:
    """The main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the application
    if niceness:
        with suppress(psutil.Error, OSError):
            own = psutil.Process()
            if sys.platform == "win32":
                own.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
            else:
                own.nice(max(own.nice(), niceness))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        work(pipe, *arguments)


def _end_with_parent() -> None:
    """End this process, whatever it is doing, when the application has ended without ending it."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
