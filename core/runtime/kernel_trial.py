"""Checks once per load, with resident experts, that the grouped kernels compute what the portable products do.

The check also compiles the kernels, so that no answer waits for compilation. The reference is computed on the CPU: it
dequantises whole matrices, for which the device may have no room.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.memory.arena import Slot
from core.memory.codec.kernels import portable
from core.runtime.compute import ExpertMath
from core.runtime.grouped import FEW

CLOSE = 0.03  # relative error, of the result's norm: far above 16-bit rounding, far below any mistake


@torch.inference_mode()
def objection(math: ExpertMath, slots: Sequence[Slot], hidden: int, dtype: torch.dtype) -> str:
    """The reason why the kernels of `math` must not be used, "" when they agree with its portable products. `slots` are
    filled, as many as a token uses."""
    assert math.grouped is not None
    x = torch.randn(FEW + 1, hidden, generator=torch.Generator().manual_seed(0)).to(slots[0].raw.device, dtype)
    try:
        got = [math.grouped.few(slots, x[:1])[-1:]]
        if math.grouped.takes(len(x)):
            got.append(math.grouped.many(slots[-1:], [len(x)], x))
        want = _reference(math, slots[-1], x)
        errors = [float((y.cpu().float() - want[: len(y)]).norm() / want[: len(y)].norm()) for y in got]
    except Exception as error:  # any error of a compiler or driver
        return f"they do not run here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return "" if all(error < CLOSE for error in errors) else f"they are {max(errors):.1%} off in a trial"


def _reference(math: ExpertMath, slot: Slot, x: torch.Tensor) -> torch.Tensor:
    """x [n, H] through one expert, by the portable products on the CPU -> fp32 [n, H]."""
    codec = portable(math.codec)
    parts = codec.views(slot.raw.cpu())

    def product(part: str, rows: torch.Tensor) -> torch.Tensor:
        y = codec.linear(parts, part, rows)
        return y + parts.plain[part + "_bias"] if math.has_bias else y

    inner = math.activate(product(math.up_name, x.cpu()).to(x.device))
    return product("down_proj", inner.cpu()).float()
