"""Makes what computes a model's experts, and tries once per load, with filled slots, whether a GPU's kernels compute
what the portable products do.

The trial also compiles the kernels, so that no answer waits for compilation. The reference is computed on the CPU: it
dequantises whole matrices, for which the device may have no room.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.kernels import make_kernels, portable, say_unavailable
from core.memory.codec.layers import LayerCodecs
from core.runtime.expert_math import ExpertMath, ExpertScratch
from core.runtime.grouped import FEW

CLOSE = 0.03  # relative error, of the result's norm: far above 16-bit rounding, far below any mistake


def make_math(experts: Sequence[Any], codecs: LayerCodecs) -> list[ExpertMath]:
    """One per experts module of the model, which reads slots of its layer's codec."""
    made = {codec: _maker(experts[0], codec) for codec in codecs.distinct}
    return [made[codec](module) for module, codec in zip(experts, codecs, strict=True)]


def _maker(first: Any, codec: Codec) -> Callable[[Any], ExpertMath]:
    """Makes what computes the experts of modules like the `first`, with what they share."""
    kernels, placed = make_kernels(codec), ExpertMath(first, codec).needs_places()
    if codec.whole is None:
        return lambda module: ExpertMath(module, codec, kernels, placed=placed)
    whole, blocks = codec.whole
    scratch, whole_placed = ExpertScratch(whole, blocks), ExpertMath(first, whole).needs_places()
    return lambda module: ExpertMath(
        module, codec, kernels, (ExpertMath(module, whole, placed=whole_placed), scratch), placed=placed
    )


def choose_products(math: Sequence[ExpertMath], slots: Callable[[int], Sequence[Slot]], dtype: torch.dtype) -> None:
    """Try with filled `slots` of some layer, as many as a token uses, whether the grouped kernels of a GPU are correct
    here: on the first layer of each codec that has any."""
    tried = dict[Codec, list[Slot]]()
    for layer, one in enumerate(math):
        if one.grouped is not None and not tried.get(one.codec):
            tried[one.codec] = found = [*slots(layer)]
            if found and (reason := objection(one, found, one.inputs, dtype)):
                say_unavailable(reason)
                for other in math:
                    other.choose(kernels=False)
                return


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
