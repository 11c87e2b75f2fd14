"""`python -m tests.memory.interpreted_rotary [EXAMPLES]`: the kernel of rotary embeddings under Triton's interpreter,
as JSON {file of a function: {number type: calls}}, of so many drawn sizes, or of ONE. Fails where a bit is not that of
the function.

A process of its own: the interpreter is chosen when the kernels are imported, and stays chosen.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

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
    found = []

    def one(sizes: Sizes) -> None:
        rotation, case = Rotation(function.own), (function.file, dtype, sizes)
        rotation._tried.clear()
        rotation(*drawn(function, sizes, dtype))
        (kernel,) = rotation._tried.values()
        assert isinstance(kernel, fused_rotary.FusedRotation), case
        assert kernel.form == function.form(sizes.width, dtype), case
        states = drawn(function, sizes, dtype, seed=7)
        assert identical(rotation(*states), function.own(*states)), case
        found.append(case)

    if examples:
        settings(UNHURRIED, max_examples=examples)(given(sizes=DRAWN)(one))()
    else:
        one(ONE)
    return len(found)


def round_to_nearest() -> None:
    """From fp32 to bfloat16, as compiled kernels do (tests/memory/test_rotary_kernel.py sees it in their code); the
    interpreter cuts bits off."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    real = InterpreterBuilder.cast_impl

    def cast(self: Any, given: Any, kind: Any) -> Any:
        if (given.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return real(self, given, kind)
        rounded = torch.from_numpy(given.data.astype(np.float32)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast


def main() -> None:
    """Print what was compared."""
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1"
    round_to_nearest()
    rotary.BACKENDS["cpu"], rotary.ELEMENTS = fused_rotary, 64
    examples = int(*sys.argv[1:] or [0])
    with torch.inference_mode():
        found = {
            name: {str(dtype): compared(function, dtype, examples) for dtype in DTYPES}
            for name, function in FUNCTIONS.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
