"""Tests for small experts on a CPU whether one product over copied weights is faster than one per expert, and exact.

With small experts, calling a product costs more than computing it; with large ones, copying the weights together costs
more than it saves. So both are timed with the loaded model. Which kernel a product uses depends on shapes, not on
values: if results are bit-identical here, they are for every token. One input is not enough to tell: sums in another
order nearly always round to the same 16 bits (to the same 32, one in a few).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from core.memory.arena import Slot
from core.runtime.compute import ExpertMath

ROUNDS, CALLS = 9, 8
ELEMENTS = {2: 1 << 16, 4: 1 << 11}  # elements compared, by bytes per element
WORTH_IT = 0.95
LARGEST_BYTES = 16 << 20  # of copied weights per layer; far beyond where copying pays off


@torch.inference_mode()
def worth_stacking(math: ExpertMath, slots: Sequence[Slot], hidden: int, dtype: torch.dtype) -> bool:
    """Whether `math` should stack the experts of a token; `slots` = filled slots, as many as a token uses."""
    size = sum(slot.raw.numel() for slot in slots)
    if not math.can_copy or len(slots) < 2 or slots[0].raw.device.type != "cpu" or size > LARGEST_BYTES:
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = -(-ELEMENTS[dtype.itemsize] // (hidden * len(slots)))
    for x in torch.randn(inputs, 1, hidden, generator=generator).to(dtype):
        for n in range(2, len(slots) + 1):
            if not torch.equal(math.one_by_one(slots[:n], x), math.stacked(slots[:n], x)):
                return False
    each, together = [], []
    for _ in range(ROUNDS):
        each.append(_seconds(lambda: math.one_by_one(slots, x)))
        together.append(_seconds(lambda: math.stacked(slots, x)))
    return statistics.median(together) < WORTH_IT * statistics.median(each)


def _seconds(compute: Callable[[], torch.Tensor]) -> float:
    began_s = time.perf_counter()
    for _ in range(CALLS):
        compute()
    return time.perf_counter() - began_s
