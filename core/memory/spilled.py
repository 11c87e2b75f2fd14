"""Slots that a driver keeps in system memory. On Windows, and in WSL, NVIDIA's driver does not refuse memory that the
GPU does not have: it takes the host's in its place, which the GPU reads over the link. A read of each slab is timed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

LINK_GBPS = 60.0  # what no link of these systems reaches (PCIe 5 x16: 55), and every GPU's own memory does
LEAST = 16 << 20  # bytes of a slab whose time says something: fewer are read about as fast as a kernel starts
READS = 2  # the first may have to bring memory back to the GPU


def may_spill(device: torch.device) -> bool:
    """Whether the driver may give a device's programs memory of the host."""
    wddm = platform.system() == "Windows" or "microsoft" in platform.release().lower()
    return device.type == "cuda" and torch.version.hip is None and wddm


def read_s(memory: torch.Tensor) -> float:
    """Seconds in which the device reads bytes [n] uint8: the least of some times. Waits for them."""
    words, marks = memory[: len(memory) // 4 * 4].view(torch.int32), list[torch.cuda.Event]()
    for _ in range(READS + 1):
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        words.amax()
    marks[-1].synchronize()
    return min(float(a.elapsed_time(b)) for a, b in pairwise(marks)) / 1e3


def spilled_bytes(slabs: Iterable[torch.Tensor], read: Callable[[torch.Tensor], float] = read_s) -> int:
    """Bytes of slabs that are not read as fast as a GPU's own memory is."""
    return sum(one.nbytes for one in slabs if one.nbytes >= LEAST and one.nbytes < LINK_GBPS * 1e9 * read(one))
