"""`doctor` on a machine with a GPU."""

from __future__ import annotations

import pytest
import torch

from app.cli import probes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_what_is_said_of_it() -> None:
    gpu = probes.gpus()[0]
    assert gpu["usable"] and gpu["total_bytes"] >= gpu["free_bytes"] > 0
    assert probes.link(5, 64 * probes.MB)["gbps"] > 1


def test_its_slot_in_the_machine() -> None:
    pytest.importorskip("pynvml")
    assert probes.gpus()[0]["pcie"]["width_max"] > 0
