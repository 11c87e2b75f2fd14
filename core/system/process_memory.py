"""What the process keeps beside the model, held down: garbage collection, freed memory, other libraries' caches.

None of it is in the budget, so little of it may be there.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import time

PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
# oneDNN and torch's layer above it each keep the last 1024 products that they made code for, by shape. A prompt has a
# shape for every number of tokens that an expert is given: 2000 tokens left 270 MB behind that were never asked for
# again (64 experts, 16 layers), and with 32 kept take no longer.


TRIM_S = 30.0
_trimmed_s = 0.0


def bound_caches() -> None:
    """Before torch computes anything. What the user has set stays."""
    for name, kept in PRODUCTS.items():
        os.environ.setdefault(name, kept)


def give_back() -> None:
    """Memory that nothing refers to any more, to the system, before more is asked for."""
    gc.collect()
    trim()


def settle() -> None:
    """What exists now lives as long as the engine: no collection need look at it. What loading freed is given back."""
    give_back()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would report their own objects as leaked when Python ends


def unsettle() -> None:
    """The model is gone: give its memory back now."""
    gc.unfreeze()
    give_back()


def trim_now_and_then() -> None:
    """`trim`, unless it was done within TRIM_S. For the end of an answer: prompts of many lengths leave their memory in
    pieces that the allocator keeps (85 MB after four minutes of ten clients; 22 ms to give it back)."""
    global _trimmed_s
    if time.monotonic() - _trimmed_s > TRIM_S:
        trim()
        _trimmed_s = time.monotonic()


def trim() -> None:
    """Give memory that was freed back to the system. Only glibc keeps so much of it that it must be told."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)
