"""`python -m tests.memory.interpret interpreted_attention[:all]`: the kernels of a decoded token's attention under
Triton's interpreter, {case: error / its bound}. bfloat16 is left out, whose products the interpreter does not know."""

from unittest.mock import patch

import torch

from core.hf import attention_launch
from core.hf.attention_launch import CHUNK, TRIED, AttentionKernels, Shape, exact
from core.memory.codec.kernels import ByTriton

CASES = {  # heads, heads of keys and values, width, width of values, positions kept, of which these are filled
    "grouped": (4, 2, 32, 32, 3 * CHUNK, (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK)),
    "odd": (3, 1, 80, 80, 70, (64, 65)),
}
LONG = {
    "each its own": (2, 2, 24, 16, CHUNK + 7, (5, CHUNK + 7)),
    "many parts": (2, 1, 16, 16, 20 * CHUNK, (16 * CHUNK, 16 * CHUNK + 1, 20 * CHUNK)),  # joined in two rounds
}


def errors(
    heads: int, shared: int, width: int, values: int, kept: int, filled: tuple[int, ...], both: bool
) -> dict[str, float]:
    """Of keys and values that lie in memory for more positions, before which nothing of theirs ends; each number of
    positions in `both` number types, or in one of them by turns."""
    found, random = dict[str, float](), torch.Generator().manual_seed(kept)
    for at, dtype in enumerate((torch.float32, torch.float16)):
        made = AttentionKernels(Shape(heads, shared, width, values, dtype, width**-0.5), ByTriton)
        q = torch.randn(1, heads, 1, width, generator=random).to(dtype)
        k, v = (torch.randn(1, shared, kept + 9, of, generator=random).to(dtype) for of in (width, values))
        k[:, :, kept:], v[:, :, kept:] = float("nan"), float("nan")
        for count in filled if both else filled[at::2]:
            want = exact(q, k[:, :, :count], v[:, :, :count], width**-0.5)
            here = made(q, k[:, :, :count], v[:, :, :count], None)
            there = made(q, k[:, :, :kept], v[:, :, :kept], torch.tensor([count - 1]))
            assert torch.equal(here, there), "bits depend on where the number of positions is"
            bound = 4 * torch.finfo(dtype).eps * float(want.norm())
            found[f"{dtype} {count}"] = float((here[0, 0].float() - want).norm()) / bound
    return found


def found(which: str) -> dict[str, float]:
    both = which == "all"
    cases, tried = (CASES | LONG, TRIED) if both else (CASES, (CHUNK + 1,))
    with (
        torch.inference_mode(),
        patch.object(attention_launch.kernels, "launcher_of", lambda device: ByTriton),
        patch.object(attention_launch, "TRIED", tried),
    ):
        shape = Shape(4, 2, 16, 16, torch.float16, 0.25)
        assert attention_launch.tried(shape, torch.device("cpu")) is not None
        return {f"{name} {what}": one for name, case in cases.items() for what, one in errors(*case, both).items()}
