"""Launches through the CUDA driver, run from what reached it: the kernels' results are right, and faults are found."""

from __future__ import annotations

import pytest

from core.memory.codec import FORMATS
from tests.kernel_cases import CODED
from tests.memory.test_kernels import interpreted


def test_each_kernel() -> None:
    """Also that two arguments which changed places are found, and a number wrongly said to be a multiple of 16."""
    found = interpreted("few", module="driven")
    assert len(found["errors"]) == 5
    assert not {case: error for case, error in found["errors"].items() if not error < 1}
    assert found["not_multiples"] > 0  # the compiler is told so, or the driver would have refused
    assert found["planted"]["swapped"] > 1
    assert "stride = 45 was said to be a multiple of 16" in found["planted"]["multiples"]


@pytest.mark.long(2.5)
def test_every_format() -> None:
    errors = interpreted(module="driven")["errors"]
    for name in FORMATS:
        tried = [case for case in errors if case.startswith(f"{name} ")]
        assert len(tried) == 6 + (name in CODED)
    assert not {case: error for case, error in errors.items() if not error < 1}
