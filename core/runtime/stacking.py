"""Small experts on a CPU: is one product over copies of their weights quicker than a product each, and the same?

Calling a product costs more than computing it when experts are small; copying the weights together costs more than
it saves when they are large. So both are tried where the model runs. Which kernel a product takes depends on shapes,
not on values: if the results are equal bit for bit here, they are for every token. One input is too few to tell: sums
in another order nearly always round to the same 16 bits (to the same 32, one in a few).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from core.memory.arena import Slot
from core.runtime.compute import ExpertMath

ROUNDS, CALLS = 9, 8
ELEMENTS = {2: 1 << 16, 4: 1 << 11}  # results compared, by the bytes of each
WORTH_IT = 0.95
LARGEST_BYTES = 16 << 20  # of copies a layer; far beyond where copying pays


@torch.inference_mode()
def worth_stacking(math: ExpertMath, slots: Sequence[Slot], hidden: int, dtype: torch.dtype) -> bool:
    """Whether `math` should stack the experts of a token; `slots` = as many filled ones as a token uses."""
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
