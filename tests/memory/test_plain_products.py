"""Products of plain blocks on a CPU: as near to the exact ones as their number type allows, whoever computes a row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec.matrix import Matrix, Part
from core.memory.codec.native import plain
from core.memory.codec.native.plain import PlainProducts
from core.memory.codec.native.threads import share, shared_by
from core.system.native.compile import widths
from tests.memory.test_native import WIDTHS, needs_kernels
from tests.selection import layered

FIRST = 64  # bytes before the matrix in its slot
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def described(outputs: int, inputs: int, dtype: torch.dtype, transposed: bool = False) -> Matrix:
    return Matrix(outputs, inputs, transposed, 0, 0, "", Part(FIRST, dtype), None, None, None, None)


def slots(count: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Bytes of slots with random matrices."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        raw = torch.zeros(FIRST + outputs * inputs * dtype.itemsize, dtype=torch.uint8)
        raw[FIRST:].view(dtype).copy_(torch.randn(outputs * inputs, generator=random).to(dtype))
        found.append(raw)
    return found


def weights(slot: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return slot[FIRST:].view(dtype).view(-1, inputs).double()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(4, 4), (12, 28), (64, 32), (192, 96), (20, 204)])
def test_sums_are_exact_to_fp32_and_rounded_once(outputs: int, inputs: int, dtype: torch.dtype, width: int) -> None:
    held = slots(3, outputs, inputs, dtype)
    products = PlainProducts(described(outputs, inputs, dtype), width)
    states = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = torch.stack([weights(one, inputs, dtype) @ x.double() for one, x in zip(held, states, strict=True)])
    got = products.several([(1, [one.data_ptr() for one in held])], states)
    half = torch.finfo(dtype).eps / 2
    assert got.dtype == dtype and ((got.double() - want).abs() <= half * want.abs() + 2.0**-20 * want.norm()).all()


@needs_kernels
@given(count=st.integers(1, 24), threads=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_row_is_the_same_whatever_is_computed_beside_it(count: int, threads: int, seed: int) -> None:
    outputs, inputs, before = 64, 192, shared_by()
    held = slots(count, outputs, inputs, torch.bfloat16, seed)
    products = PlainProducts(described(outputs, inputs, torch.bfloat16))
    x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()
    share(threads)
    try:
        together = products.several([(1, [one.data_ptr() for one in held])], x.expand(count, -1))
    finally:
        share(before)
    alone = [products.several([(1, [one.data_ptr()])], x) for one in held]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    layered([(4, 4), (12, 28), (192, 96), (20, 204)], quick=lambda case: case in ((12, 28), (20, 204))),
)
def test_several_rows_of_a_slot_are_each_the_one_alone(
    outputs: int, inputs: int, dtype: torch.dtype, width: int
) -> None:
    kept = slots(3, outputs, inputs, dtype)
    held = [one.data_ptr() for one in kept]
    products = PlainProducts(described(outputs, inputs, dtype), width)
    runs = [(n, [held[n % 3], held[(n + 1) % 3]]) for n in range(1, plain.STATES + 1)]
    own = [slot for count, some in runs for slot in some for _ in range(count)]
    x = torch.randn(len(own), inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(products.several(runs, x), products.several([(1, own)], x))


def test_other_matrices_are_left_to_torch() -> None:
    served = plain.serves(described(64, 32, torch.bfloat16))
    assert served == bool(widths())
    assert plain.serves(described(63, 32, torch.float32)) == served
    assert not plain.serves(described(64, 30, torch.bfloat16))
    assert not plain.serves(described(64, 32, torch.bfloat16, transposed=True))
