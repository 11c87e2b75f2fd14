"""A profile of the fake model, and a calibration that makes one in no time."""

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ModelError, ProfileError
from core.profile import Profile
from core.settings.calibration import CalibrationSettings
from tests.fake_models import SHAPE
from tests.fakes import FakeEngine


def fake_profile(
    model: str = "demo",
    model_hash: str = "fake",
    parts: Collection[str] = ("counts", "pairs", "tae"),
    source: str = "the bundled prompts",
    tokens: int = 1000,
) -> Profile:
    """A profile of the fake model with some of the parts that hold arrays."""
    rng, s = np.random.default_rng(0), SHAPE
    pairs = rng.poisson(2.0, (s.layers, s.experts, s.experts)).astype(np.float32)
    for one in pairs:
        np.fill_diagonal(one, 0)
    recall = np.linspace(0.5, 0.8, s.layers, dtype=np.float32)
    recall[0] = np.nan
    likeness = np.random.default_rng(1).uniform(-0.2, 0.6, (s.layers, s.experts, s.experts))
    for one in likeness:
        one[:] = (one + one.T) / 2
        np.fill_diagonal(one, 1)
    arrays = {
        "counts": {"counts": rng.integers(0, 500, (s.layers, s.experts))},
        "pairs": {"pairs": pairs, "pairs_weighted": pairs / 3},
        "gate_recall": {"gate_recall": recall, "similarity": recall[1:]},
        "tae": {"tae": np.sort(rng.random((s.layers, 101)).astype(np.float32), 1)},
        "peaks": {"peaks": rng.uniform(1, 2, (s.layers, s.experts)).astype(np.float32)},
        "likeness": {"likeness": likeness.astype(np.float16)},
        "times": {"times": {"att": 0.2, "moe": 0.5, "head": 0.1, "load": 1.1}},
    }
    chosen: dict[str, Any] = {}
    for part in parts:
        chosen |= arrays.get(part, {})
    return Profile(
        model, model_hash, s.layers, s.experts, s.top_k, s.hidden, tokens, source, "2026-01-01T12:00:00+00:00", **chosen
    )


def fake_calibrate(
    engine: FakeEngine,
    texts: Sequence[Any],
    *,
    parts: Collection[str],
    traces: Sequence[Any],
    source: str,
    limit: int,
    settings: CalibrationSettings,
    folder: Path,
    progress: Callable[[str, float], None],
    cancel: threading.Event,
) -> Profile:
    """What `core.measure.calibrate.gather.calibrate` does, in twenty steps. A text "broken" is refused; with "slow"
    among the texts it stands still in the middle until somebody cancels it."""
    if "broken" in texts:
        raise ProfileError("The text cannot be read.")
    for step in range(20):
        progress("Reading 1,000 tokens", step / 20)
        if cancel.wait(None if "slow" in texts and step == 10 else 0.0):
            raise ModelError("Cancelled.")
    return fake_profile(engine.model_name, engine.model_hash, parts, source)
