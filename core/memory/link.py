"""Link timing: the pace of an emulated link, and the measured bandwidth of the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a simulated link needs no torch
    import torch

TURNS = 15  # of the trial of waking a thread


@dataclass(frozen=True, slots=True)
class Link:
    """The link that experts are copied over, as it was measured or is emulated."""

    gbps: float  # GB/s (1e9 bytes)
    latency_us: float = 0.0  # of each copy
    emulated: bool = False

    @classmethod
    def read(cls, manifest: Mapping[str, object]) -> Link | None:
        """The link of a load, from its manifest (core.engine.manifest); None where it names none."""
        gbps, latency_us = (float(str(manifest.get(name) or 0.0)) for name in ("link_gbps", "link_latency_us"))
        return cls(gbps, latency_us, manifest.get("link") == "emulated") if gbps else None

    def copy_ms(self, size_bytes: int) -> float:
        """Milliseconds of one copy."""
        return self.latency_us / 1e3 + size_bytes / self.gbps / 1e6


@dataclass(slots=True)
class Pace:
    """An emulated link: copies run at full speed, then their completion is delayed until the slower link would be done.

    The link carries one copy at a time. A copy starts when it was submitted or when the link became free, whichever is
    later, regardless of when the worker thread wakes up, so oversleeping does not slow the emulated link down.
    """

    gbps: float  # GB/s (1e9 bytes); 0 = no pacing
    latency_us: float
    _free_s: float = 0.0  # when the link becomes free, on perf_counter

    def __bool__(self) -> bool:
        return self.gbps > 0

    def duration_s(self, size_bytes: int) -> float:
        """Seconds that one copy occupies the link."""
        return self.latency_us * 1e-6 + size_bytes / (self.gbps * 1e9)

    def book(self, submitted_s: float, size_bytes: int) -> tuple[float, float]:
        """Reserve the link for one copy; returns (start, end) on perf_counter."""
        start = max(self._free_s, submitted_s)
        self._free_s = start + self.duration_s(size_bytes)
        return start, self._free_s

    @property
    def free_s(self) -> float:
        return self._free_s


REFERENCE = "Qwen3-30B-A3B in bf16 on an RTX A6000 over PCIe 4 x16"
LOAD_TO_LAYER = 0.77  # on it, 84-88 % of on-demand TPOT is copying (Speculating Experts), so 8 t / (8 t + 1) = .86


def scaled_gbps(layer_ms: float, size_bytes: int, latency_us: float) -> float:
    """Bandwidth that gives the same ratio of expert copy time to layer compute time as the REFERENCE machine.

    `layer_ms` = measured time of one layer, `size_bytes` = one expert. Rounded to two digits because it is used as a
    setting.
    """
    seconds = max(LOAD_TO_LAYER * layer_ms * 1e-3 - latency_us * 1e-6, 1e-6)
    return float(f"{size_bytes / seconds / 1e9:.2g}")


def sleep_until(when_s: float) -> None:
    """Wait until perf_counter reaches `when_s`: sleeps first, then yields, so that other threads keep running."""
    while (left := when_s - time.perf_counter()) > 0:
        time.sleep(left - 1.5e-4 if left > 3e-4 else 0)


@lru_cache(maxsize=1)
def handover_s() -> float:
    """Seconds until another thread, which is woken, has done what it was woken for and this one goes on: the median of
    TURNS. Measured once per process."""
    woken, done, spans = threading.Event(), threading.Event(), list[float]()

    def answer() -> None:
        for _ in range(TURNS):
            woken.wait()
            woken.clear()
            done.set()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for _ in range(TURNS):
        began_s = time.perf_counter()
        woken.set()
        done.wait()
        done.clear()
        spans.append(time.perf_counter() - began_s)
    thread.join()
    return median(spans)


@lru_cache(maxsize=8)
def measure_gbps(device: torch.device, size_bytes: int = 16 << 20, repeats: int = 5) -> float:
    """GB/s of host-to-device copies (pinned memory to CUDA; memory to memory on a CPU, by a thread like those
    that copy experts): the best of `repeats`.

    Measured once per process.
    """
    if device.type == "cuda":
        return _best_gbps(device, size_bytes, repeats)
    from core.system.native import openmp

    with ThreadPoolExecutor(1, initializer=openmp.single_thread) as copying:
        return copying.submit(_best_gbps, device, size_bytes, repeats).result()


def _best_gbps(device: torch.device, size_bytes: int, repeats: int) -> float:
    import torch

    cuda = device.type == "cuda"
    try:
        source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=cuda)
    except RuntimeError:  # the system lets no more be pinned
        source = torch.empty(size_bytes, dtype=torch.uint8)
    source.fill_(1)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device).fill_(0)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)
        best = max(best, size_bytes / (time.perf_counter() - start) / 1e9)
    return best
