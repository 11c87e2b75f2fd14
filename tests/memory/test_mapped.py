"""Where kernels read pinned memory is what the driver says, and what it refuses is a reason in words."""

import ctypes

import pytest
import torch

from core.errors import DeviceError
from core.memory import mapped
from core.memory.cuda_driver import open_driver
from tests.fake_driver import INVALID, FakeDriver


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    open_driver.cache_clear()


def test_the_driver_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    row, driver = torch.zeros(64, dtype=torch.uint8), FakeDriver().driver()
    monkeypatch.setattr(mapped, "open_driver", lambda: driver)
    assert mapped.device_address(row) == row.data_ptr() + (1 << 40)


def test_what_it_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(faults={"cuMemHostGetDevicePointer_v2": INVALID}).driver()
    monkeypatch.setattr(mapped, "open_driver", lambda: driver)
    with pytest.raises(DeviceError, match=r"no address of pinned memory \(CUDA error: invalid argument"):
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
