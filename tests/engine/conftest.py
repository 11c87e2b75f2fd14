"""A tiny chat model on disk, and an engine over it with half of its experts resident."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.engine.profiles import drawn_profile
from tests.mtp_checkpoint import counting, dense
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("chat_model")))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose answers a draft model can guess."""
    return counting(save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("large"))), 0.5)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense(tmp_path_factory.mktemp("small"))


@pytest.fixture
def fresh(model: Path) -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"budget": "50%"}), context=256))
    yield engine
    engine.unload()


@pytest.fixture
def engine(fresh: Engine) -> Engine:
    """A module may put another in its place."""
    return fresh


@pytest.fixture(scope="module")
def exact(model: Path) -> Iterator[Engine]:
    """In fp32, in one pool of slots, with a drawn profile."""
    settings = Settings({"budget": "50%", "scope": "global"})
    engine = Engine.load(LoadSpec.checked(str(model), settings, dtype="float32", context=256))
    engine.use_profile(drawn_profile(engine))
    yield engine
    engine.unload()


@pytest.fixture
def of_four(model: Path) -> Iterator[Engine]:
    """For four sequences, in fp32: two greedy answers can only differ where two logits are nearly the same."""
    spec = LoadSpec.checked(str(model), Settings({"budget": "50%"}), context=128, dtype="float32", sequences=4)
    engine = Engine.load(spec)
    yield engine
    engine.unload()
