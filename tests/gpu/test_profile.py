"""Calibration on a GPU finds what it finds on a CPU, and times passes with the device's own events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.measure.calibrate.gather import calibrate
from core.profile import PARTS, Profile
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TEXTS = ["The same text is read on either device.", "And another one, of some more words than the first one has."]


def test_a_profile_of_either_device_is_the_same(tmp_path: Path) -> None:
    model, found = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "model")), list[Profile]()
    for device in ("cpu", "cuda"):
        engine = Engine.load(
            LoadSpec.checked(str(model), Settings({"budget": "50%"}), device=device, dtype="float32", context=128)
        )
        try:
            found.append(calibrate(engine, TEXTS, parts=set(PARTS) - {"path"}))
            engine.expert_cache.check_integrity()
        finally:
            engine.unload()
    cpu, cuda = found
    assert cpu.tokens == cuda.tokens and cpu.parts() == cuda.parts()
    assert cpu.counts is not None and cuda.counts is not None
    assert np.abs(cpu.counts - cuda.counts).sum() <= 0.02 * cpu.counts.sum()  # near ties may fall the other way
    for name in ("defaults", "maps", "map_keys"):
        one, other = (getattr(profile, name).astype(np.float32) for profile in found)
        assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(one)
    assert cuda.times is not None and all(value > 0 for value in cuda.times.values())
    said = cuda.settings["times"]
    assert isinstance(said, dict) and said["all_resident"]
