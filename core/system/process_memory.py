"""Limits the process's memory outside the model: garbage collection, freed memory, other libraries' caches.

None of it is in the budget, so it has to stay small.
"""

import atexit
import ctypes
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable

PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
# oneDNN and torch's layer above it each cache compiled code for the last 1024 product shapes. A prompt has a
# shape for every number of tokens routed to an expert: 2000 tokens left 270 MB behind that were never used
# again (64 experts, 16 layers), and with 32 kept they take no longer.


ALLOCATOR = {"MALLOC_ARENA_MAX": (-8, 2), "MALLOC_MMAP_THRESHOLD_": (-3, 4 << 20)}
# glibc's own variable for each limit: (number of the option in mallopt, value). By default every thread that allocates
# gets an arena of its own, up to 8 a core, and the size from which a block is mapped for itself follows the largest one
# freed so far, up to 32 MB: after eight minutes of ten clients 217 MB lay free between blocks in use; 70 MB with these.


TRIM_S = 30.0
_trimmed_s = 0.0


def bound_caches() -> None:
    """Limit the caches; call before torch computes anything. The user's own settings are kept."""
    for name, kept in PRODUCTS.items():
        os.environ.setdefault(name, kept)
    if (mallopt := _of_glibc("mallopt")) is not None:
        for name, (option, value) in ALLOCATOR.items():
            if name not in os.environ:
                mallopt(option, value)


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of the calls that `error` ended, and of those that ended in what caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def release_memory() -> None:
    """Return unreferenced memory to the system, before more is allocated."""
    gc.collect()
    trim()


def freeze_gc() -> None:
    """Exclude the existing objects, which live as long as the engine, from garbage collection, and return memory freed
    by loading."""
    release_memory()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report their objects as leaked at exit


def unfreeze_gc() -> None:
    """Return the memory of an unloaded model."""
    gc.unfreeze()
    release_memory()


def trim_now_and_then() -> None:
    """`trim`, unless it ran within TRIM_S. For the end of an answer: prompts of many lengths leave fragmented memory
    that the allocator keeps (85 MB after four minutes of ten clients; 22 ms to return it)."""
    global _trimmed_s
    if time.monotonic() - _trimmed_s > TRIM_S:
        trim()
        _trimmed_s = time.monotonic()


def trim() -> None:
    """Return freed memory to the system. Only glibc keeps enough of it to need this."""
    if (release := _of_glibc("malloc_trim")) is not None:
        release(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's allocator; None on other systems and with other C libraries."""
    if sys.platform != "linux" or not hasattr(process := ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    return getattr(process, name, None)
