"""A model half of whose experts are resident, with a profile of all that lossy options need."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.policy.substitute.entropy import TEMPERATURES
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.engine.lossy.passes import RESIDENT
from tests.engine.profiles import drawn_profile
from tests.equality.passes import plain_transformers


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked(str(model), Settings(RESIDENT), context=256))
    random, shape = np.random.default_rng(3), engine.shape
    square = (shape.layers, shape.experts, shape.experts)
    pairs = random.integers(1, 40, square).astype(np.float32)
    profile = replace(
        drawn_profile(engine),
        pairs=pairs + pairs.transpose(0, 2, 1),
        likeness=random.random(square).astype(np.float16),
        norms=random.random(square[:2]).astype(np.float32),
        tae=np.sort(random.random((shape.layers, 101)).astype(np.float32), 1).clip(0.1, 0.9),
    )
    profile.tae[:, 100] = 1.0
    profile = replace(profile, tae_tempered=np.stack([profile.tae] * len(TEMPERATURES), 1))
    engine.use_profile(profile)
    yield engine
    engine.unload()


@pytest.fixture(autouse=True)
def fresh(engine: Engine) -> None:
    engine.change({**Settings(), **RESIDENT})
    engine.expert_cache.reshape(make_policy=engine.expert_cache.make_policy)
    engine.parts.recorder.forget()


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return plain_transformers(model, torch.float32)
