"""The first estimate of a machine that other programs use: what they take is not taken for the machine's own."""

import itertools

import pytest
import torch

from core.capacity import forecast
from tests.threads import torch_threads


@pytest.mark.parametrize(("busy", "alone_ms"), [(0.0, 1.0), (0.6, 1.0)])
def test_calls_that_were_disturbed_do_not_count(monkeypatch: pytest.MonkeyPatch, busy: float, alone_ms: float) -> None:
    """A call takes 1 ms, or 9 beside another program; with two threads 40 where that has the second core."""
    now_s, numbers = 0.0, itertools.count()

    def work(_: int) -> None:
        nonlocal now_s
        disturbed = next(numbers) % 10 < 10 * busy
        now_s += (40 if busy and torch.get_num_threads() > 1 else 9 if disturbed else 1) * 1e-3

    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now_s)
    with torch_threads(2):
        assert 1e3 * forecast._seconds(work, torch.device("cpu")) == pytest.approx(alone_ms)
        assert torch.get_num_threads() == 2, "as it was"
