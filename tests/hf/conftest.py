"""What tests of models share."""

from collections.abc import Iterator

import pytest
import torch

from core.hf import fused_rotary, rotary
from tests.hf.rotary_cases import ByTorch


@pytest.fixture
def rotary_by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rotary, "_tried", {})
    monkeypatch.setattr(fused_rotary, "available", lambda device: device.type == "cpu")
    monkeypatch.setattr(fused_rotary, "made", ByTorch)
    with torch.inference_mode():
        yield
