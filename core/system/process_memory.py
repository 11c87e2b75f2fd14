"""Limits the process's memory outside the model: garbage collection, freed memory, other libraries' caches.

None of it is in the budget, so it has to stay small.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import time

PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
# oneDNN and torch's layer above it each cache compiled code for the last 1024 product shapes. A prompt has a
# shape for every number of tokens routed to an expert: 2000 tokens left 270 MB behind that were never used
# again (64 experts, 16 layers), and with 32 kept they take no longer.


TRIM_S = 30.0
_trimmed_s = 0.0


def bound_caches() -> None:
    """Limit the caches; call before torch computes anything. The user's own settings are kept."""
    for name, kept in PRODUCTS.items():
        os.environ.setdefault(name, kept)


def give_back() -> None:
    """Return unreferenced memory to the system, before more is allocated."""
    gc.collect()
    trim()


def settle() -> None:
    """Exclude the existing objects, which live as long as the engine, from garbage collection, and return memory freed
    by loading."""
    give_back()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report their objects as leaked at exit


def unsettle() -> None:
    """Return the memory of an unloaded model."""
    gc.unfreeze()
    give_back()


def trim_now_and_then() -> None:
    """`trim`, unless it ran within TRIM_S. For the end of an answer: prompts of many lengths leave fragmented memory
    that the allocator keeps (85 MB after four minutes of ten clients; 22 ms to return it)."""
    global _trimmed_s
    if time.monotonic() - _trimmed_s > TRIM_S:
        trim()
        _trimmed_s = time.monotonic()


def trim() -> None:
    """Return freed memory to the system. Only glibc keeps enough of it to need this."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)
