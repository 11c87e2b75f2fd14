"""Dense layers of many tokens on a CPU by our own products, bit-identical to the model's own modules.

Where a CPU has no instructions for bfloat16, torch multiplies one state by one row of the weights at a time, and
`core.memory.codec.native.dots` does the same several times as fast. A layer uses it only if it returns identical bytes
on random states; for all other inputs the module's own forward runs.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

from core.hf.own_forward import OWN
from core.hf.quantized_linear import QuantizedLinear
from core.memory.codec import Codec, PartSpec, SlotParts, make_codec
from core.memory.codec.native.threads import WORTH_IT

PART = "weight"
TRIED = 3  # tokens of the trial


def patch_linears(model: nn.Module) -> list[nn.Module]:
    """Replace the `forward` of every dense layer that passes the trial; returns those modules."""
    found: list[nn.Module] = []
    for module in model.modules():
        if type(module) is nn.Linear and OWN not in vars(module) and _fits(module):
            quick = _Quick(module)
            if quick.agrees():
                vars(module)[OWN] = quick
                found.append(module)
    return found


def dense_codecs(model: nn.Module) -> list[Codec]:
    """What multiplies by the dense layers of a model, each kind once, where there is more than one way to do so."""
    found: dict[int, Codec] = {}
    for module in model.modules():
        quick = vars(module).get(OWN)
        codec = quick.codec if isinstance(quick, _Quick) else module.codec if type(module) is QuantizedLinear else None
        if codec is not None:
            found[id(codec)] = codec
    return list(found.values())


def _fits(module: nn.Linear) -> bool:
    weight = module.weight
    plain = module.bias is None and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return plain and weight.is_contiguous() and weight.nbytes >= WORTH_IT and bool(_codec(*weight.shape).ways(PART))


@lru_cache(maxsize=256)
def _codec(outputs: int, inputs: int) -> Codec:
    specs = {PART: PartSpec((outputs, inputs), torch.bfloat16)}
    return make_codec("checkpoint", specs=specs, dtype=torch.bfloat16, device=torch.device("cpu"))


class _Quick:
    """The replacement forward of one layer, x [..., in] -> [..., out]."""

    def __init__(self, module: nn.Linear) -> None:
        self._own: Callable[[torch.Tensor], torch.Tensor] = module.forward
        self._module, self.codec = module, _codec(*module.weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inputs = x.shape[-1]
        if x.numel() <= inputs or x.dtype != torch.bfloat16 or x.device.type != "cpu" or torch.is_grad_enabled():
            return self._own(x)
        return self.codec.linear(self._parts(), PART, x.reshape(-1, inputs)).view(*x.shape[:-1], -1)

    def _parts(self) -> SlotParts:
        weight = self._module.weight
        return SlotParts({PART: (weight.t(), weight)}, {}, weight.data_ptr())

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Whether all ways return the module's very bits for random states."""
        random = torch.Generator().manual_seed(0)
        x = torch.randn(1, TRIED, self._module.in_features, generator=random).bfloat16()
        wanted = self._own(x)[0]
        return all(torch.equal(way(self._parts(), x[0]), wanted) for way in self.codec.ways(PART).values())
