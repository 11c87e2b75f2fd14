"""`python -m tests.memory.interpreted_rotary [EXAMPLES]`: the kernel of rotary embeddings under Triton's interpreter,
as JSON {file of a function: {number type: calls of drawn sizes}}. Fails where a bit is not that of the function.

A process of its own: the interpreter is chosen when the kernels are imported, and stays chosen.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.hf import fused_rotary, rotary
from core.hf.rotary import Rotation
from tests.hf.rotary_cases import DTYPES, FUNCTIONS, Sizes, drawn, identical
from tests.memory.interpreted import UNHURRIED


def compared(examples: int) -> dict[str, Counter[str]]:
    """Calls of each function that were computed by the kernel, with every bit its own."""
    found: dict[str, Counter[str]] = {name: Counter() for name in FUNCTIONS}
    for name in FUNCTIONS:
        for dtype in DTYPES:

            @settings(UNHURRIED, max_examples=examples)
            @given(
                sizes=st.builds(
                    Sizes,
                    heads=st.integers(1, 4),
                    keys=st.integers(1, 2),
                    width=st.integers(1, 40).map(lambda half: 2 * half),
                    rest=st.integers(0, 20),
                    tokens=st.integers(1, 2),
                    split=st.booleans(),
                )
            )
            def one(sizes: Sizes, name: str = name, dtype: torch.dtype = dtype) -> None:
                function = FUNCTIONS[name]
                rotation = Rotation(function.own)
                rotation(*drawn(function, sizes, dtype))
                (kernel,) = [*rotation._tried.values()][-1:]
                assert isinstance(kernel, fused_rotary.FusedRotation), (name, dtype, sizes)
                assert kernel.form == function.form(sizes.width, dtype)
                states = drawn(function, sizes, dtype, seed=7)
                assert identical(rotation(*states), function.own(*states)), (name, dtype, sizes)
                found[name][str(dtype)] += 1

            one()
    return found


def main() -> None:
    """Print what was compared."""
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1"
    rotary.BACKENDS["cpu"], rotary.ELEMENTS = fused_rotary, 1
    with torch.inference_mode():
        print(json.dumps(compared(int(*sys.argv[1:] or [2]))))


if __name__ == "__main__":
    main()
