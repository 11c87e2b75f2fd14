"""A tiny chat model in float32, an engine over it with half of its experts resident, and transformers' own model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.engine.profiles import drawn_profile
from tests.equality.passes import plain_transformers
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("evaluated")))


@pytest.fixture(scope="package")
def engine(model: Path) -> Iterator[Engine]:
    """One for all tests: an evaluation must leave it as it was."""
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"budget": "50%"}), dtype="float32", context=64))
    engine.use_profile(drawn_profile(engine))
    yield engine
    engine.unload()


@pytest.fixture(scope="package")
def plain(model: Path) -> Any:
    return plain_transformers(model, torch.float32)
