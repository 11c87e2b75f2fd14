"""Python's garbage collector, kept from looking at a model's objects again and again while it answers."""

from __future__ import annotations

import atexit
import gc


def settle() -> None:
    """What exists now lives as long as the engine: no collection need look at it."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would report their own objects as leaked when Python ends


def unsettle() -> None:
    """The model is gone: give its memory back now."""
    gc.unfreeze()
    gc.collect()
