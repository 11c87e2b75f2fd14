"""Bounds of logits."""

from __future__ import annotations

import torch

from core.runtime.program.cap import capped
from tests.runtime.program.calls import drawn, needs_kernels, same

pytestmark = needs_kernels


def test_each_logit_is_bounded_whatever_lies_beside_it() -> None:
    logits = 40 * drawn(1, 3, 77)
    found = logits.clone()
    capped(found, 30.0)
    torch.testing.assert_close(found, 30 * torch.tanh(logits / 30), rtol=1e-5, atol=1e-5)
    for row in range(3):
        alone = logits[row : row + 1, row:].clone()
        capped(alone, 30.0)
        same(alone, found[row : row + 1, row:].contiguous())
