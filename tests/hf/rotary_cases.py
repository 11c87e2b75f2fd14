"""The functions with which transformers' files rotate queries and keys, and random arguments as attention has them."""

from typing import Any, NamedTuple

import pytest
import torch

from core.hf.rotary_form import Form, Order, Pair, Table, rotated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Function(NamedTuple):
    """A function of a file, and the form that it has where tables are of the states' number type."""

    file: str
    name: str
    given: Order
    put: Order
    table: Table
    rounds: bool
    entries: float = 1.0  # of the tables, for a number that is rotated
    passes_on: bool = False  # numbers beyond the tables' entries
    single: bool = False  # its tables are always fp32

    @property
    def own(self) -> Any:
        module = pytest.importorskip(f"transformers.models.{self.file}.modeling_{self.file}")
        return getattr(module, self.name)

    def form(self, width: int, dtype: torch.dtype) -> Form:
        """What it should be taken for. In fp32 a product is what it is rounded to."""
        rounds = dtype == torch.float32 or (self.rounds and not self.single)
        return Form(width, self.given, self.put, self.table, rounds)


USUAL = "apply_rotary_pos_emb"
FUNCTIONS = {
    one.file: one
    for one in (
        Function("qwen3_moe", USUAL, "halves", "halves", "halves", True),
        Function("glm4_moe", USUAL, "halves", "halves", "halves", True, passes_on=True),
        Function("gpt_oss", USUAL, "halves", "halves", "first", True, entries=0.5),
        Function("deepseek_v3", f"{USUAL}_interleave", "pairs", "halves", "first", True),
        Function("flex_olmo", USUAL, "halves", "halves", "halves", True, single=True),
        Function("ernie4_5_moe", USUAL, "pairs", "pairs", "first", False),
        Function("cohere2_moe", USUAL, "pairs", "pairs", "pairs", False),
    )
}


class Sizes(NamedTuple):
    heads: int
    keys: int
    width: int
    rest: int = 0  # numbers of a head that are passed on
    tokens: int = 1
    split: bool = False  # a part of what a projection gives, and not all of it


ON_GPU = (
    Sizes(32, 4, 128),
    Sizes(64, 8, 64, rest=64),
    Sizes(16, 16, 80, rest=7, tokens=5, split=True),
    Sizes(3, 1, 4, rest=1, tokens=32),  # with two numbers there is one couple, in which all orders are the same
)


def drawn(function: Function, sizes: Sizes, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Any]:
    random = torch.Generator().manual_seed(seed)
    head = sizes.width + (sizes.rest if function.passes_on else 0)

    def states(heads: int) -> torch.Tensor:
        row = torch.randn(1, sizes.tokens, heads, head + 24 * sizes.split, generator=random) * 3
        return row.to(device, dtype).transpose(1, 2)[..., 8 * sizes.split :][..., :head]

    def table() -> torch.Tensor:
        entries = int(sizes.width * function.entries)
        numbers = torch.randn(1, sizes.tokens, entries, generator=random)
        return numbers.to(device, torch.float32 if function.single else dtype)

    return [states(sizes.heads), states(sizes.keys), table(), table()]


def bits(some: torch.Tensor) -> torch.Tensor:
    return some.view({2: torch.int16, 4: torch.int32}[some.itemsize])


def identical(got: Any, want: Any) -> bool:
    return all(
        one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(bits(one), bits(other))
        for one, other in zip(got, want, strict=True)
    )


SIZES = Sizes(4, 2, 32, rest=16)


class ByTorch:
    """In the place of the GPU's kernel, which tests/memory/test_compiled.py and tests/gpu have."""

    def __init__(self, form: Form, states: Pair, tables: Pair, results: Pair) -> None:
        self.form, self._like = form, results

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return tuple(
            torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(rotated(self.form, x, cos, sin))
            for like, x in zip(self._like, (q, k), strict=True)
        )
