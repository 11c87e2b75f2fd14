"""How long a decode pass takes to compute here, copies left out.

It chooses the number of CPU threads, and is the yardstick that an emulated link is scaled to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from core.runtime.recorder import Recorder
from core.types import Phase

PASSES = 9
LONGEST_S = 0.5   # of timing one number of threads; a slow model is timed over fewer passes
WORTH_IT = 0.97   # more threads must be this much faster: what they cost the rest of the machine is not in the time


class Threads:
    """CPU threads of torch: all of them to read a prompt, `decode` of them for one token (0 = all there, too)."""

    def __init__(self, decode: int = 0) -> None:
        self._all = torch.get_num_threads()
        self.decode = decode or self._all

    def use(self, phase: Phase) -> None:
        """For the calling thread, from now on."""
        wanted = self.decode if phase == "decode" else self._all
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


def choose_threads(device: torch.device, asked: int, time_pass_ms: Callable[[], float]) -> tuple[Threads, float]:
    """Threads for a model, and the milliseconds of a decode pass with them (0 on a GPU, where nothing is timed).

    `asked` = 0 takes the fastest of 1, 2, 4 ... all.
    """
    if device.type != "cpu":
        return Threads(), 0.0
    most = torch.get_num_threads()
    best, best_ms = most, float("inf")
    for threads in [asked] if asked else sorted({min(2**i, most) for i in range(most.bit_length() + 1)}):
        torch.set_num_threads(threads)
        pass_ms = time_pass_ms()
        if pass_ms < WORTH_IT * best_ms:
            best, best_ms = threads, pass_ms
    torch.set_num_threads(most)
    return Threads(best), best_ms


@torch.inference_mode()
def time_pass(model: Any, cache: Any, recorder: Recorder) -> float:
    """Milliseconds of one decode pass without its waits: the median of a few. What it recorded is forgotten."""
    passes: list[float] = []
    while len(passes) < PASSES and (len(passes) < 2 or sum(passes) < LONGEST_S):
        recorder.begin()
        began_s = time.perf_counter()
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        passes.append(time.perf_counter() - began_s - recorder.stall_s)
    recorder.forget()
    return statistics.median(passes) * 1e3
