"""Dense weights and norms of a model's modules, bound where they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core.errors import ModelError
from core.hf.quantized_linear import WEIGHT, QuantizedLinear
from core.memory.codec.base import Base
from core.memory.codec.fast.products import CanonicalProducts, serves
from core.memory.codec.matrix import Matrix, Part, matrix
from core.runtime.program.rms import Norm

FP32 = torch.float32
CLOSE = 0.02  # of a module's results: it computes in 16 bits
TRIED = 16  # random rows


@dataclass(frozen=True, slots=True)
class Weight:
    """A dense matrix in memory that does not move."""

    products: CanonicalProducts
    slot: int
    owner: object
    bias: torch.Tensor | None = None  # [outputs], that is added to each product

    @property
    def outputs(self) -> int:
        return self.products.matrix.outputs

    @property
    def inputs(self) -> int:
        return self.products.matrix.inputs


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm, and where its weights are."""

    form: Norm
    at: int
    owner: object


def has_weights(module: nn.Module) -> bool:
    """Whether anything in a module computes with weights."""
    return next(module.parameters(), None) is not None or any(type(one) is QuantizedLinear for one in module.modules())


def known(module: nn.Module, names: tuple[str, ...]) -> None:
    """Raises ModelError where a module has other parts with weights than these."""
    others = [name for name, one in module.named_children() if name not in names and has_weights(one)]
    others += [name for name, _ in module.named_parameters(recurse=False) if name not in names]
    missing = [name for name in names if not hasattr(module, name)]
    if others or missing:
        parts = f"it has {', '.join(others)}" if others else f"it has no {', '.join(missing)}"
        raise ModelError(f"{type(module).__name__} is not known: {parts}")


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a module returns, without its hooks."""
    return type(module).forward(module, *args, **kwargs)


@contextmanager
def replaced(module: nn.Module, instead: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Meanwhile a call of the module is one of `instead`."""
    kept = vars(module).get("forward")
    vars(module)["forward"] = instead
    try:
        yield
    finally:
        del vars(module)["forward"]
        if kept is not None:
            vars(module)["forward"] = kept


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ by no more than rounding."""
    wanted = wanted.float()
    return bool((found.float() - wanted).norm() < CLOSE * wanted.norm())


@torch.inference_mode()
def norm_of(module: Any, width: int = 0) -> NormWeight:
    """An RMSNorm: found by what it does to a row. `width` of one without weights."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    has = isinstance(weight, torch.Tensor) and weight.dim() == 1
    if isinstance(eps, float) and (has or (weight is None and width)):
        x = drawn(weight.dtype if has else FP32, 2, len(weight) if has else width)
        got, given = forward(module, x), x.float()
        plain = given * (given.square().mean(-1, keepdim=True) + eps).rsqrt()
        if not has and near(got, plain):
            return NormWeight(Norm(width, eps), 0, module)
        for offset in (False, True) if has else ():
            if near(got, plain * (weight.float() + offset)):
                return NormWeight(Norm(len(weight), eps, weight.dtype, offset), weight.data_ptr(), weight)
    raise ModelError(f"norms of the kind {type(module).__name__} are not known")


def weight_of(module: Any, *, tried: bool = True) -> Weight:
    """A dense layer; one that is not `tried` may be on any device."""
    bias = getattr(module, "bias", None)
    bias = None if bias is None else bias.detach()
    if type(module) is QuantizedLinear:
        assert isinstance(module.codec, Base)
        return _served(matrix(module.codec, WEIGHT), module.address, module, bias)
    if type(module) is nn.Linear:
        return plain_weight(module.weight, module, bias, tried=tried)
    raise ModelError(f"dense layers of the kind {type(module).__name__} are not known")


def plain_weight(weight: torch.Tensor, owner: object, bias: torch.Tensor | None, *, tried: bool = True) -> Weight:
    """A matrix [outputs, inputs] of plain numbers."""
    if weight.dim() != 2 or not weight.is_contiguous() or (tried and weight.device.type != "cpu"):
        raise ModelError("a weight is not where the program can read it")
    outputs, inputs = weight.shape
    found = Matrix(outputs, inputs, False, 0, 0, "", Part(0, weight.dtype), None, None, None, None)
    return _served(found, weight.data_ptr(), owner, bias)


def _served(found: Matrix, slot: int, owner: object, bias: torch.Tensor | None) -> Weight:
    if not serves(found):
        raise ModelError("this CPU has no kernels for a dense layer of the model")
    return Weight(CanonicalProducts(found, FP32), slot, owner, bias)
