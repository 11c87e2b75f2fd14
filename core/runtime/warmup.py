"""How long a decode pass takes to compute here, copies left out: the yardstick that an emulated link is scaled to."""

from __future__ import annotations

import time
from typing import Any

import torch

from core.runtime.recorder import Recorder

PASSES = 9


@torch.inference_mode()
def time_pass(model: Any, cache: Any, recorder: Recorder) -> float:
    """Milliseconds of one decode pass without its waits: the median of a few. What it recorded is forgotten."""
    passes = []
    for _ in range(PASSES):
        recorder.begin()
        began_s = time.perf_counter()
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        passes.append(time.perf_counter() - began_s - recorder.stall_s)
    recorder.forget()
    return sorted(passes)[PASSES // 2] * 1e3
