"""Products straight out of slots, several experts a launch, by Triton kernels on a GPU.

    gemv.py      states times matrices: decoding, and prompts of few tokens
    widen.py     matrices as plain weights: longer prompts, multiplied by torch
    blocks.py    how much of a matrix a program computes
    products.py  what calls them: the fields of a codec's slots, launches, scratch memory

Where the kernels are not available the codec's own `linear` computes, and the log says so once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch

from core.memory.codec.base import Base, Codec
from core.memory.codec.kernels.products import LANES_MOST, SlotKernels, portable, scratch_bytes

__all__ = ["LANES_MOST", "SlotKernels", "available", "make_kernels", "portable", "say_unavailable", "scratch_bytes"]

log = logging.getLogger("moestro.kernels")


def why_not(device: torch.device) -> str:
    """Why the kernels cannot run on a device, "" when they can be tried.

    On a CPU they run under Triton's interpreter alone (TRITON_INTERPRET=1), which is for tests; on a GPU never with it,
    because it copies what it knows of to the CPU and would find no slots there.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type == "cpu" and not interpreted:
        return "there is no GPU"
    if device.type not in ("cpu", "cuda"):
        return f"they are not written for {device.type}"
    if device.type == "cuda" and interpreted:
        return "TRITON_INTERPRET is set"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (on Windows: triton-windows)"
    return ""


def available(device: torch.device) -> bool:
    """Whether the kernels can be tried on a device."""
    return not why_not(device)


def make_kernels(codec: Codec) -> SlotKernels | None:
    """Kernels for a codec's slots; None, said once in the log for a GPU, where they cannot run."""
    reason = why_not(codec.device)
    if not reason and isinstance(codec, Base):
        try:
            return SlotKernels(codec)
        except Exception as error:  # a broken installation of triton, however it shows
            reason = f"triton cannot be loaded ({error})"
    if codec.device.type == "cuda":
        say_unavailable(reason)
    return None


@functools.cache
def say_unavailable(reason: str) -> None:
    """Say, once, that experts are computed without the kernels."""
    log.warning(
        "Experts are computed one at a time, more slowly: the grouped GPU kernels are not used, because %s.", reason
    )
