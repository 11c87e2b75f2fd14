"""Slots for which a driver took system memory: found by the time of a read, on Windows and in WSL alone."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from core.memory import arena, spilled
from core.memory.spilled import LEAST, may_spill, read_s, spilled_bytes
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda
from tests.logged import Logged

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [("Windows", "11", True), ("Linux", "5.15.1-microsoft-standard-WSL2", True), ("Linux", "6.8.0", False)],
)
def test_where_a_driver_does_so(system: str, release: str, spills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    assert may_spill(GPU) == spills and not may_spill(torch.device("cpu"))


def test_what_is_read_as_slowly_as_over_a_link_is_counted() -> None:
    """Not what is so small that starting takes as long as reading."""
    slabs = [torch.empty(size, dtype=torch.uint8) for size in (LEAST, LEAST + 1, LEAST // 2)]
    gbps = {id(slabs[0]): 400.0, id(slabs[1]): 25.0, id(slabs[2]): 5.0}
    assert spilled_bytes(slabs, lambda one: one.nbytes / gbps[id(one)] / 1e9) == LEAST + 1


def test_a_read_is_timed_on_the_device(fake_cuda: FakeCuda) -> None:
    memory = torch.empty(1003, dtype=torch.uint8, device=GPU)
    assert read_s(memory) > 0


@pytest.mark.parametrize("seconds", [1.0, 0.0])
def test_a_load_says_so(
    seconds: float, fake_cuda: FakeCuda, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    monkeypatch.setattr(spilled, "LEAST", 0)
    monkeypatch.setattr(arena, "may_spill", lambda device: True)
    monkeypatch.setattr(arena, "spilled_bytes", lambda slabs: spilled_bytes(slabs, lambda one: seconds))
    with engine_on(model, {"budget": "all"}):
        pass
    said = [one.getMessage() for one in caplog.records if "as slowly as system memory" in one.getMessage()]
    assert len(said) == int(seconds)
