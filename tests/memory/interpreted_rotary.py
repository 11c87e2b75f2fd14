"""`python -m tests.memory.interpret interpreted_rotary[:EXAMPLES]`: the kernel of rotary embeddings under Triton's
interpreter, {file of a function: {number type: calls}}, of so many drawn sizes in every number type, or of ONE in one.
Fails where a bit is not that of the function."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.hf import fused_rotary, rotary
from core.hf.rotary import Rotation
from tests.hf.rotary_cases import DTYPES, FUNCTIONS, Function, Sizes, drawn, identical
from tests.memory.interpreted import UNHURRIED

ONE = Sizes(2, 1, 10, rest=3, tokens=2, split=True)
DRAWN = st.builds(
    Sizes,
    heads=st.integers(1, 4),
    keys=st.integers(1, 2),
    width=st.integers(4, 40).map(lambda half: 2 * half),
    rest=st.integers(0, 20),
    tokens=st.integers(1, 2),
    split=st.booleans(),
)


def compared(function: Function, dtype: torch.dtype, examples: int) -> int:
    """Calls of a function that were computed by the kernel, with every bit its own."""
    calls = []

    def one(sizes: Sizes) -> None:
        rotation, case = Rotation(function.own), (function.file, dtype, sizes)
        rotation._tried.clear()
        rotation(*drawn(function, sizes, dtype))
        (kernel,) = rotation._tried.values()
        assert isinstance(kernel, fused_rotary.FusedRotation), case
        assert kernel.form == function.form(sizes.width, dtype), case
        states = drawn(function, sizes, dtype, seed=7)
        assert identical(rotation(*states), function.own(*states)), case
        calls.append(case)

    if examples:
        settings(UNHURRIED, max_examples=examples)(given(sizes=DRAWN)(one))()
    else:
        one(ONE)
    return len(calls)


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """From fp32 to bfloat16, as compiled kernels do (tests/memory/test_compiled.py sees it in their code); the
    interpreter itself cuts bits off."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    real = InterpreterBuilder.cast_impl

    def cast(self: Any, given: Any, kind: Any) -> Any:
        if (given.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return real(self, given, kind)
        rounded = torch.from_numpy(given.data.astype(np.float32)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    with patch.object(InterpreterBuilder, "cast_impl", cast):
        yield


def found(which: str) -> dict[str, dict[str, int]]:
    examples, each = int(which or 0), cycle(DTYPES)
    with (
        rounding_to_nearest(),
        patch.dict(rotary.BACKENDS, cpu=fused_rotary),
        patch.object(rotary, "ELEMENTS", 64),
        torch.inference_mode(),
    ):
        return {
            name: {str(dtype): compared(function, dtype, examples) for dtype in (DTYPES if examples else [next(each)])}
            for name, function in FUNCTIONS.items()
        }
