"""A tiny chat model on disk, and an engine over it with half of its experts resident."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("chat_model")))


@pytest.fixture
def fresh(model: Path) -> Iterator[Engine]:
    """Loaded for one test."""
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"budget": "50%"}), context=256))
    yield engine
    engine.unload()


@pytest.fixture
def engine(fresh: Engine) -> Engine:
    """A module may put another in its place."""
    return fresh
