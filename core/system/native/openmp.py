"""The threads of torch, as GNU's OpenMP runs them: for functions of ours, and kept to the one thread that computes.

torch's threads spin for milliseconds after each of its operations, so that a second pool gets a processor of its
own only where operations of one kind follow one another for long. Where torch brings GNU's OpenMP, whose entry point
for compiled code is public, its pool runs our functions too.

Every thread that lets torch share an operation gets a pool of its own, which lives as long as the thread. Once all
pools together have more threads than there are processors, none of them spins any more: each operation then waits until
the system has woken its helpers, several times as long as a token's operations take. So threads that compute only on
the side compute alone, and a thread that stops computing ends its helpers. With other runtimes both do nothing.

torch has one more pool, which a process that is forked makes anew at the first operation. Threads that begin together
then find none ("Invalid thread pool!"), so a forked process makes it before there is another thread.
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

import torch

SOFT = 1  # omp_pause_soft: give back threads, keep settings


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The runtime that torch uses, if it is GNU's."""
    home, wanted = Path(torch.__file__).parent, torch.get_num_threads()
    for file in sorted([*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]):
        try:
            library = ctypes.CDLL(str(file))
            threads = library.omp_get_max_threads()
        except (OSError, AttributeError):
            continue
        if threads == wanted:  # which torch has set in this thread: it is the one that torch uses
            return library
    return None


@functools.cache
def entry() -> int:
    """The address of GOMP_parallel(function, argument, threads, flags) in the runtime that torch uses; 0 where it uses
    another one."""
    library = _library()
    return 0 if library is None else ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0


def single_thread() -> None:
    """The calling thread lets no other threads share its torch operations from now on."""
    if (library := _library()) is not None:
        torch.get_num_threads()  # sets this thread's number where nothing has: not again after this
        library.omp_set_num_threads(1)


def stop_workers() -> None:
    """End the threads that share the calling thread's torch operations, until there is one to share again."""
    if (library := _library()) is not None and hasattr(library, "omp_pause_resource_all"):  # since GCC 9
        library.omp_pause_resource_all(SOFT)


def stop_spinning() -> None:
    """Give the calling thread a pool of its own with more threads than there are processors: until `stop_workers`
    ends it, no pool spins while it waits."""
    if (library := _library()) is not None:
        nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, (os.cpu_count() or 1) + 1, 0)


if sys.platform != "win32":  # which has no forks
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
