"""exp in fp32 as the kernels compute it."""

import functools

import numpy as np
import pytest
import torch

from core.runtime.program import exp
from core.runtime.program.vectors import LANES, Kernel
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, needs_kernels, same

pytestmark = needs_kernels
EDGES = [0, -0.0, 1, -1, 88.72, 88.73, 89, 90, -87.3, -87.4, -103.9, -103.98, -104, -105, 1e-45, 3e38, -3e38]
VALUES = np.concatenate(
    [np.array([*EDGES, np.inf, -np.inf, np.nan], np.float32), np.linspace(-106, 91, 200_003, dtype=np.float32)]
)
X = torch.from_numpy(VALUES[: len(VALUES) // 8 * 8].copy())


@functools.cache
def kernel(name: str) -> int:
    code = Kernel(name)
    at = code.fields(("x", "out"))
    with code.loop("%from", "%to", LANES) as each:
        value = code.read(at["x"], each.index, LANES, torch.float32)
        code.write(getattr(exp, name)(code, value), at["out"], each.index, LANES, torch.float32)
    return code.address()


def computed(name: str) -> torch.Tensor:
    out = torch.empty_like(X)
    call(kernel(name), ("x", "out"), len(X), x=X, out=out)
    return out


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_the_bits_are_those_of_the_order_that_is_stated(name: str) -> None:
    same(computed(name), np.asarray(getattr(oracle, name)(X.numpy())))


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    true = torch.exp(X.double())
    found = computed("exp").double()
    normal = (X > -87.33) & (X < 88.72)
    place = torch.exp2(torch.floor(torch.log2(true[normal]))) * 2.0**-23
    assert float(((found[normal] - true[normal]).abs() / place).max()) <= 1.0
    subnormal = (X <= -87.33) & (X >= -103.9)
    assert float((found[subnormal] - true[subnormal]).abs().max()) <= 2.0**-149


def test_exp_at_the_ends_of_its_range() -> None:
    found = dict(zip(VALUES[:20].tolist(), computed("exp")[:20].tolist(), strict=True))
    assert found[0] == 1 and found[-104] == found[-105] == found[-np.inf] == 0
    assert found[89] == found[90] == found[np.inf] == np.inf
    assert computed("exp")[19].isnan()


@pytest.mark.parametrize(("name", "bound"), [("sigmoid", 1.3e-7), ("tanh", 2e-7)])
def test_what_is_made_of_exp_is_close(name: str, bound: float) -> None:
    true = getattr(torch, name)(X.double())
    assert float((computed(name).double() - true).abs().nan_to_num().max()) < bound


def test_the_oracle_rounds_multiply_adds_once() -> None:
    """Against fractions, where fp64 alone would round twice."""
    from fractions import Fraction

    random = np.random.default_rng(1)
    a, b = (random.standard_normal(400).astype(np.float32) for _ in "ab")
    c = (random.standard_normal(400) * 10.0 ** random.integers(-12, 6, 400)).astype(np.float32)
    a[0], b[0], c[0] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60  # a tie in fp32, but for c
    for x, y, z, found in zip(a, b, c, oracle.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(found)) - exact)
        for other in (np.nextafter(found, np.float32(np.inf)), np.nextafter(found, np.float32(-np.inf))):
            away = abs(Fraction(float(other)) - exact)
            assert error < away or (error == away and not int(found.view(np.int32)) & 1)
