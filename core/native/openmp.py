"""The threads of torch, for functions of ours: one more pool would compete with them for the processor.

torch's threads spin for milliseconds after each of its operations, so that a pool beside them gets a processor of its
own only where operations of one kind follow one another for long. Where torch brings GNU's OpenMP, whose entry point
for compiled code is public, its pool runs our functions too.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def entry() -> int:
    """The address of GOMP_parallel(function, argument, threads, flags) in the runtime that torch uses; 0 where it uses
    another one."""
    home, wanted = Path(torch.__file__).parent, torch.get_num_threads()
    for file in sorted([*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]):
        try:
            library = ctypes.CDLL(str(file))
            threads = library.omp_get_max_threads()
        except (OSError, AttributeError):
            continue
        if threads == wanted:  # which torch has set in this thread: it is the one that torch uses
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0
