"""RMS norms of one token on a CPU in a few instructions, bit-identical to the model's own modules.

A norm of one token is about eight torch calls on a thousand numbers: the call overhead exceeds the computation. All but
the sum, whose order of summation is torch's own, is done in two native functions. A module uses them only if they
return identical bytes on random states; for all other inputs the module's own forward runs.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from core.system.native import numbers
from core.system.native.compile import Function, compiled, widths
from core.system.native.ir import Code, fp32

MOST = 1 << 15  # numbers of a state, or of all heads: above this, torch's calls are as fast
ELEMENTS = 1 << 16  # numbers compared in a trial
LANES = 16
OWN = "forward"  # attribute of a module that shadows its class's method

Forward = Callable[[torch.Tensor], torch.Tensor]


class Form(NamedTuple):
    """Compile-time parameters of the functions."""

    width: int
    epsilon: float
    dtype: torch.dtype


_tried: dict[tuple[type[nn.Module], Form], bool] = {}


def patch_rmsnorms(model: nn.Module) -> list[nn.Module]:
    """Replace the `forward` of every norm that passes the trial; returns those modules.

    A kind of norm is tried once in a process, since the result depends on its code and the CPU; each module's own
    weights once more, on a single state.
    """
    found: list[nn.Module] = []
    for module in model.modules():
        form = _form(module)
        if form is not None and widths():
            quick, kind = _Quick(module, form), (type(module), form)
            if kind not in _tried:
                # single states, then many heads at once
                half, heads = ELEMENTS // form.width // 2, max(MOST // form.width // 2, 1)
                _tried[kind] = quick.agrees(1, max(half, 1)) and quick.agrees(heads, 2)
            if _tried[kind] and quick.agrees(1, 1):
                vars(module)[OWN] = quick
                found.append(module)
    return found


def restore(modules: Iterable[nn.Module]) -> None:
    """Undo `patch_rmsnorms`."""
    for module in modules:
        vars(module).pop(OWN, None)


def _form(module: nn.Module) -> Form | None:
    """The computation of a module that may be a norm; None for all others."""
    weights = list(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [name for name, _ in weights] != ["weight"] or not isinstance(epsilon, float) or OWN in vars(module):
        return None
    weight = weights[0][1]
    if weight.dim() != 1 or weight.numel() % LANES or weight.device.type != "cpu" or weight.dtype not in numbers.KINDS:
        return None
    return Form(weight.numel(), epsilon, weight.dtype)


class _Quick:
    """The replacement forward of one norm, x [..., width] -> [..., width]."""

    def __init__(self, module: nn.Module, form: Form) -> None:
        self._own: Forward = module.forward
        self._form, self._weight = form, module.get_parameter("weight")
        self._square, self._finish = _functions(form)

    def __call__(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        if (
            x.numel() > MOST
            or x.dtype != self._form.dtype
            or not x.is_contiguous()
            or x.device.type != "cpu"
            or torch.is_grad_enabled()
            or more
            or named
        ):
            return self._own(x, *more, **named)
        squares, out = torch.empty(x.shape, dtype=torch.float32), torch.empty_like(x)
        at = x.data_ptr()
        self._square(at, squares.data_ptr(), x.numel())
        sums = squares.sum(-1)
        self._finish(at, sums.data_ptr(), self._weight.data_ptr(), out.data_ptr(), sums.numel())
        return out

    @torch.inference_mode()
    def agrees(self, rows: int, times: int) -> bool:
        """Whether the output is bit-identical to the module's for `rows` random states at once, `times` over."""
        random = torch.Generator().manual_seed(0)
        for _ in range(times):
            x = torch.randn(1, rows, self._form.width, generator=random) * 4 ** torch.randn((), generator=random)
            x = x.to(self._form.dtype)
            try:
                if not torch.equal(self(x), self._own(x)):
                    return False
            except Exception:  # a module that is not a norm rejects this input
                return False
        return True


@functools.cache
def _functions(form: Form) -> tuple[Function, Function]:
    made = compiled(_square(form), _finish(form), width=widths()[0])
    return made["square"], made["finish"]


def _square(form: Form) -> Code:
    """Generates @square(x, out, n): n squares in fp32."""
    code = Code("void @square(ptr noalias %x, ptr noalias %out, i64 %n)")
    with code.loop(0, "%n", LANES) as each:
        x = numbers.load(code, "%x", each.index, LANES, form.dtype)
        squared = code.let(f"fmul <{LANES} x float> {x}, {x}")
        code.store(f"<{LANES} x float>", squared, code.at("%out", each.index, 4), 4)
    return code


def _finish(form: Form) -> Code:
    """Generates @finish(x, sums, weight, out, rows): x / sqrt(sum / width + epsilon), rounded, times the weight."""
    code = Code("void @finish(ptr noalias %x, ptr noalias %sums, ptr noalias %weight, ptr noalias %out, i64 %rows)")
    floats = f"<{LANES} x float>"
    with code.loop(0, "%rows") as row:
        total = code.load("float", code.at("%sums", row.index, 4), 4)
        mean = code.let(f"fdiv float {total}, {fp32(form.width)}")
        root = code.call("float", "llvm.sqrt.f32", ("float", code.let(f"fadd float {mean}, {fp32(form.epsilon)}")))
        by = code.broadcast("float", code.let(f"fdiv float {fp32(1.0)}, {root}"), LANES)
        first = code.times(row.index, form.width)
        with code.loop(0, form.width, LANES) as each:
            at = code.add(first, each.index)
            x = code.let(f"fmul {floats} {numbers.load(code, '%x', at, LANES, form.dtype)}, {by}")
            x = numbers.again(code, x, LANES, form.dtype)
            weight = numbers.load(code, "%weight", each.index, LANES, form.dtype)
            numbers.store(code, code.let(f"fmul {floats} {x}, {weight}"), "%out", at, LANES, form.dtype)
    return code
