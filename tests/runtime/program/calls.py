"""Calls of the kernels of core.runtime.program on tensors, with drawn splits of the units; drawn tensors."""

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.system.native.compile import supported

needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels can be compiled for this CPU")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def call(
    kernel: int, names: Sequence[str], units: int, splits: Sequence[int] = (), **given: torch.Tensor | int
) -> None:
    """Computes all units, each run between two of `splits` by a call of its own, last one first."""
    assert given.keys() <= set(names), set(given) - set(names)
    values = [given.get(name, 0) for name in names]
    block = np.array([v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values], np.int64)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel)
    ends = sorted({0, units, *(split % (units + 1) for split in splits)})
    for begin, end in reversed([*itertools.pairwise(ends)]):
        function(block.ctypes.data, begin, end)


def drawn(seed: int, *shape: int, wild: bool = False) -> torch.Tensor:
    """Numbers of a normal distribution in fp32. `wild`: of all magnitudes; some are 0, -0, subnormal or the largest,
    and about one row in four has an infinity or NaN."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape).astype(np.float32)
    if wild:
        values *= np.float32(10) ** random.integers(-20, 18, shape).astype(np.float32)
        odd = random.choice(np.array([0, -0.0, 1e-41, -1e-41, 3e38, -3e38], np.float32), shape)
        values = np.where(random.random(shape) < 0.02, odd, values)
        rows = values.reshape(-1, shape[-1])
        for row in range(len(rows)):
            if random.random() < 0.25:
                rows[row, random.integers(shape[-1])] = random.choice(np.array([np.inf, -np.inf, np.nan], np.float32))
    return torch.from_numpy(values)


def same(found: torch.Tensor, expected: npt.NDArray[np.float32] | torch.Tensor) -> None:
    """Asserts the same bits, where any NaN is as good as another."""
    other = expected if isinstance(expected, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(expected))
    assert found.shape == other.shape and found.dtype == other.dtype
    ints = {4: torch.int32, 2: torch.int16}[found.element_size()]
    differs = (found.view(ints) != other.view(ints)) & ~(found.isnan() & other.isnan())
    if differs.any():
        at = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(f"{int(differs.sum())} of {found.numel()} differ, first at {at}: {found[at]} {other[at]}")
