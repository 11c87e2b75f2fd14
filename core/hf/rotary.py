"""Rotary embeddings of queries and keys on a GPU in one launch, bit-identical to the model's own code, which makes some
ten.

Attention modules call a function of their own file for it, with q, k, cos and sin. A module found to do so gets a
`forward` with the same code, in which that function's name is ours, and the registry of attention functions
(core.hf.decode_attention); nothing of transformers changes. What is called with a few tokens is tried at the first call
with states of these shapes, strides and number types: random ones, as many
as needed, and compared with the model's own function. The form that it has (core.hf.rotary_form) is computed by one
kernel (core.hf.fused_rotary) where every bit is the same, strides included. Everything else is left to the model's own
function.
"""

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from core.hf import fused_rotary
from core.hf.decode_attention import ATTENTION, REGISTRY
from core.hf.own_forward import OWN
from core.hf.rotary_form import Form, Pair, Rotate, forms, rotated

log = logging.getLogger("moestro.kernels")

GIVEN = ["q", "k", "cos", "sin"]  # the first parameters of a function that rotates queries and keys
FEW = 32  # tokens: more are not bound by calls
ELEMENTS = 1 << 12  # numbers compared in a trial
LOUDNESS = (1.0, 1 / 64, 30.0)  # of random states, one after another
BITS = {2: torch.int16, 4: torch.int32}  # by bytes of a number

Own = Callable[..., Any]

_tried: dict[Own, dict[object, Rotate | None]] = {}  # by function of a model's file, and what it was called with


class Rotation:
    """Takes the place of a model's own function."""

    def __init__(self, own: Own) -> None:
        self._own = own
        self._tried = _tried.setdefault(own, {})

    def __call__(self, *given: Any, **named: Any) -> Any:
        if named or len(given) != 4:
            return self._own(*given, **named)
        q, k, cos, sin = given
        shape = q.shape
        if k is None or len(shape) != 4 or shape[2] > FEW or torch.is_grad_enabled():
            return self._own(q, k, cos, sin)
        key = (
            shape,
            k.shape,
            cos.shape,
            sin.shape,
            q.stride(),
            k.stride(),
            cos.stride(),
            sin.stride(),
            q.dtype,
            k.dtype,
            cos.dtype,
            sin.dtype,
            q.device,
        )
        try:
            rotate = self._tried[key]
        except KeyError:
            if q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a trial waits
                return self._own(q, k, cos, sin)
            rotate = self._tried[key] = tried(self._own, (q, k), (cos, sin))
        return self._own(q, k, cos, sin) if rotate is None else rotate(q, k, cos, sin)


def replace(model: nn.Module) -> list[nn.Module]:
    """Give every module that calls such a function a `forward` that calls a `Rotation`; returns those modules.
    core.hf.own_forward.restore undoes it."""
    found: list[nn.Module] = []
    copies: dict[FunctionType, FunctionType] = {}
    for module in model.modules():
        forward: Any = type(module).forward
        ours: dict[str, Any] = {name: Rotation(function) for name, function in _rotating(forward)}
        asks = _asks(forward, REGISTRY)
        device = _device(module) if (ours or asks) and OWN not in vars(module) else None
        if device is None:
            continue
        if not fused_rotary.available(device):
            ours = {}
        if asks and device.type == "cuda":
            ours[REGISTRY] = ATTENTION
        if not ours:
            continue
        if forward not in copies:
            copies[forward] = _copy(forward, ours)
        vars(module)[OWN] = MethodType(copies[forward], module)
        found.append(module)
    return found


def _rotating(forward: Any) -> Iterator[tuple[str, Own]]:
    """The functions of its file, by name, that a forward calls to rotate queries and keys."""
    inner = _decorated(forward)
    if inner is None:
        return
    for name in inner.__code__.co_names:
        function = inner.__globals__.get(name)
        if isinstance(function, FunctionType) and list(inspect.signature(function).parameters)[:4] == GIVEN:
            yield name, function


def _decorated(forward: Any) -> FunctionType | None:
    """The innermost function of one that may be decorated; None where anything else is on the way."""
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward if isinstance(forward, FunctionType) else None


def _asks(forward: Any, name: str) -> bool:
    """Whether a forward uses what its file has by this name."""
    inner = _decorated(forward)
    return inner is not None and name in inner.__code__.co_names and name in inner.__globals__


def _device(module: nn.Module) -> torch.device | None:
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return None if tensor is None else tensor.device


def _copy(forward: FunctionType, ours: dict[str, Any]) -> FunctionType:
    """The same function, which finds `ours` where it looks for what its file has; one that decorates such a function
    calls a copy of that."""
    inner, names, closure = getattr(forward, "__wrapped__", None), forward.__globals__, forward.__closure__
    if inner is None:
        names = {**names, **ours}
    else:
        copied = CellType(_copy(inner, ours))
        closure = tuple(copied if cell.cell_contents is inner else cell for cell in closure or ())
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__annotations__, copy.__doc__ = forward.__annotations__, forward.__doc__
    copy.__qualname__, copy.__module__ = forward.__qualname__, forward.__module__
    return copy


# ---------------------------------------------------------------------- trials


@torch.inference_mode()
def tried(own: Own, states: Pair, tables: Pair) -> Rotate | None:
    """What gives the bits of a model's own function for arguments such as these; None where nothing does."""
    (q, k), (cos, sin) = states, tables
    if not _usual(states, tables) or not fused_rotary.takes(q, k, cos):
        return None
    draw = _drawing(q, k, cos, sin)
    try:
        given = [draw() for _ in range(max(len(LOUDNESS), ELEMENTS // (q.numel() + k.numel())))]
        wanted = [own(*one) for one in given]
        if not all(part.stride(-1) == 1 for part in wanted[0]):
            raise ArithmeticError("the numbers of its results are not adjacent")
        calls = list(zip(given, wanted, strict=True))
        fitting = forms(min(q.shape[-1], k.shape[-1]), cos.shape[-1], one_type=q.dtype == cos.dtype)
        form = next((form for form in fitting if all(_is(form, one, want) for one, want in calls)), None)
        if form is None:
            raise ArithmeticError("it has no known form")
        rotate = fused_rotary.made(form, states, tables, wanted[0])
        for one, want in calls:
            got = rotate(*one)
            if not _same_bits(got, want) or [part.stride() for part in got] != [part.stride() for part in want]:
                raise ArithmeticError(f"{form} differs")
    except Exception as error:  # such a function may reject these; a GPU's compiler can raise anything
        log.info("%s of %s is left as it is: %s: %s", own.__name__, own.__module__, type(error).__name__, error)
        return None
    return rotate


def _is(form: Form, given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    q, k, cos, sin = given
    return _same_bits([rotated(form, x, cos, sin) for x in (q, k)], wanted)


def _usual(states: Pair, tables: Pair) -> bool:
    """Whether these are queries and keys of one text, and tables for its tokens, with adjacent numbers."""
    (q, k), (cos, sin) = states, tables
    together = (q.shape[0], q.shape[2]) == (k.shape[0], k.shape[2]) == (1, cos.shape[-2]) and q.dtype == k.dtype
    alike = cos.shape == sin.shape and cos.dtype == sin.dtype and cos.dim() == 3 and cos.shape[0] == 1
    adjacent = all(one.stride(-1) == 1 and one.device == q.device for one in (q, k, cos, sin))
    return k.dim() == 4 and together and alike and adjacent


def _drawing(*like: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Each call gives random tensors of these shapes, strides and number types; the loudness of the first two
    changes."""
    random, loudness = torch.Generator().manual_seed(0), itertools.cycle(LOUDNESS)

    def draw() -> list[torch.Tensor]:
        factor = next(loudness)
        drawn = []
        for at, one in enumerate(like):
            extent = 1 + sum((n - 1) * by for n, by in zip(one.shape, one.stride(), strict=True))
            numbers = torch.randn(extent, generator=random) * (factor if at < 2 else 1.0)
            drawn.append(numbers.to(one.device, one.dtype).as_strided(one.shape, one.stride()))
        return drawn

    return draw


def _same_bits(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.dtype == other.dtype and torch.equal(*(of.view(BITS[of.itemsize]) for of in (one, other)))
        for one, other in zip(some, others, strict=True)
    )
