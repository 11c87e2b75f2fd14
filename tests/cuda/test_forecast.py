"""The speed to expect of a GPU is that of the kernels that will run, not of what stands in for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from core.capacity import forecast
from core.memory.codec import PartSpec, make_codec
from tests.fake_cuda import FakeCuda

SPECS = {"gate_up_proj": PartSpec((128, 64), torch.float16), "down_proj": PartSpec((64, 64), torch.float16)}
TOP_K = 4


class Kernels:
    """Notes which slots are multiplied together."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []

    def multiply(self, part: str, slots: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        assert x.shape == (1, SPECS[part].shape[1])
        self.launched.append((part, len(slots)))


def speeds(monkeypatch: pytest.MonkeyPatch, kernels: object) -> tuple[forecast.Speeds, int]:
    """The measured speeds, and how many portable products were made for them."""
    codec = make_codec("int4-g32", specs=SPECS, dtype=torch.float16, device=torch.device("cuda"))
    products: list[str] = []
    portable = codec.linear
    monkeypatch.setattr(forecast, "LONGEST_S", 0.0)
    monkeypatch.setattr(forecast, "COLD", 1 << 16)
    monkeypatch.setattr(forecast, "make_kernels", lambda codec: kernels)
    monkeypatch.setattr(codec, "linear", lambda slot, part, x: products.append(part) or portable(slot, part, x))
    forecast._measured.clear()
    return forecast.measure_speeds(codec, "int4-g32", 64, TOP_K), len(products)


def test_a_gpu_is_timed_with_its_kernels(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    found, portable = speeds(monkeypatch, kernels)
    assert portable == 0 and found.expert_ms > 0
    assert kernels.launched and {count for _, count in kernels.launched} == {TOP_K}


def test_without_kernels_by_what_will_run_instead(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Kernels):
        def multiply(self, part: str, slots: Sequence[torch.Tensor], x: torch.Tensor) -> None:
            raise OSError("no compiler")

    for kernels in (None, Broken()):
        found, portable = speeds(monkeypatch, kernels)
        assert portable > 0 and found.expert_ms > 0
