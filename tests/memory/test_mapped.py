"""Where kernels read pinned memory is what the driver says, and what it refuses is a reason in words."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import DeviceError
from core.memory import mapped


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    mapped._driver.cache_clear()


def driver(monkeypatch: pytest.MonkeyPatch, error: int) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []

    def address(found: Any, pointer: ctypes.c_void_p, flags: int) -> int:
        asked.append((pointer.value or 0, flags))
        found._obj.value = (pointer.value or 0) + (1 << 40)
        return error

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuMemHostGetDevicePointer_v2=address))
    return asked


def test_the_driver_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    row, asked = torch.zeros(64, dtype=torch.uint8), driver(monkeypatch, 0)
    assert mapped.device_address(row) == row.data_ptr() + (1 << 40)
    assert asked == [(row.data_ptr(), 0)]


def test_what_it_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, 1)
    with pytest.raises(DeviceError, match=r"no address for kernels \(CUDA error 1\)"):
        mapped.device_address(torch.zeros(1))


def test_without_its_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="cannot be opened"):
        mapped.device_address(torch.zeros(1))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(DeviceError, match="AMD"):
        mapped.device_address(torch.zeros(1))
