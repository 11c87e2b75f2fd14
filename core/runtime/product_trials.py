"""Chooses a model's products by trials with filled slots, once per load.

On a CPU: whether one product over copied weights is faster than one per expert, and exact. With small experts, calling
a product costs more than computing it; with large ones, copying the weights together costs more than it saves. So both
are timed with the loaded model. Which kernel a product uses depends on shapes, not on values: if results are
bit-identical here, they are for every token. One input is not enough to tell: sums in another order nearly always round
to the same 16 bits (to the same 32, one in a few).

On a GPU: whether the grouped kernels compute what the portable products do. The check also compiles the kernels, so
that no answer waits for compilation. The reference is computed on the CPU: it dequantises whole matrices, for which the
device may have no room.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.kernels import make_kernels, portable, say_unavailable
from core.runtime.expert_math import ExpertMath, ExpertScratch
from core.runtime.grouped import FEW

ROUNDS, CALLS = 9, 8
ELEMENTS = {2: 1 << 16, 4: 1 << 11}  # elements compared, by bytes per element
WORTH_IT = 0.95
LARGEST_BYTES = 16 << 20  # of copied weights per layer; far beyond where copying pays off
CLOSE = 0.03  # relative error, of the result's norm: far above 16-bit rounding, far below any mistake


def make_math(experts: Sequence[Any], codec: Codec) -> list[ExpertMath]:
    """One per experts module of the model; all read slots of `codec`."""
    kernels, placed = make_kernels(codec), ExpertMath(experts[0], codec).needs_places()
    if codec.whole is None:
        return [ExpertMath(module, codec, kernels, placed=placed) for module in experts]
    whole, blocks = codec.whole
    scratch, whole_placed = ExpertScratch(whole, blocks), ExpertMath(experts[0], whole).needs_places()
    return [
        ExpertMath(module, codec, kernels, (ExpertMath(module, whole, placed=whole_placed), scratch), placed=placed)
        for module in experts
    ]


def choose_products(math: Sequence[ExpertMath], slots: Sequence[Slot], dtype: torch.dtype) -> None:
    """Try with filled `slots`, as many as a token uses, whether one stacked product per token pays off, or whether the
    grouped kernels are correct here."""
    first = math[0]
    if first.grouped is not None:
        if slots and (reason := objection(first, slots, first.inputs, dtype)):
            say_unavailable(reason)
            for one in math:
                one.choose(kernels=False)
    elif first.codec.blocks == 1:
        stack = worth_stacking(first, slots, first.inputs, dtype)
        for one in math:
            one.choose(stack=stack)


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


@torch.inference_mode()
def objection(math: ExpertMath, slots: Sequence[Slot], hidden: int, dtype: torch.dtype) -> str:
    """The reason why the kernels of `math` must not be used, "" when they agree with its portable products. `slots` are
    filled, as many as a token uses."""
    assert math.grouped is not None
    x = torch.randn(FEW + 1, hidden, generator=torch.Generator().manual_seed(0)).to(slots[0].raw.device, dtype)
    try:
        got = [math.grouped.few(slots, x[:1])[-1:]]
        if not math.grouped.is_plain:
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
