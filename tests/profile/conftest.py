"""Tiny chat models, and engines over them with half of their experts resident."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.engine import Engine
from core.measure.calibrate import times
from core.policy.predict.nets import estimator, path
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.loaded import loaded
from tests.tiny_tokenizer import save_tokenizer

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="package", autouse=True)
def _little_is_trained_and_timed() -> Iterator[None]:
    """No test here is about how well a network predicts or how exact a time is: tests/prediction trains in full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator, "MOST_EPOCHS", 2)
        patch.setattr(path, "EPOCHS", 1)
        patch.setattr(path, "MOST", 1)
        patch.setattr(times, "PASSES", 4)
        yield


@pytest.fixture(scope="session")
def chat_model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`chat_model("mixtral")` is the directory of a tiny random model with a tokenizer of 256 tokens, one a byte."""
    folder = tmp_path_factory.mktemp("chat_models")

    def get(arch: str) -> Path:
        if not (folder / arch).exists():
            shutil.copytree(checkpoint(arch), folder / arch)
            save_tokenizer(folder / arch)
        return folder / arch

    return get


@pytest.fixture(scope="module")
def engine(chat_model: Callable[[str], Path]) -> Iterator[Engine]:
    """One for all tests of a file: what is calibrated must leave it as it was."""
    with loaded(chat_model("qwen3_moe"), {"budget": "50%"}, dtype="float32", context=128) as engine:
        yield engine


@pytest.fixture
def make_engine(chat_model: Callable[[str], Path]) -> Iterator[MakeEngine]:
    """`make_engine("mixtral", {"scope": "global"})`: float32, a context of 128 tokens; unloaded in the end."""
    made: list[Engine] = []

    def make(arch: str = "qwen3_moe", settings: dict[str, object] | None = None) -> Engine:
        made.append(
            Engine.load(
                LoadSpec.checked(
                    str(chat_model(arch)), Settings({"budget": "50%", **(settings or {})}), dtype="float32", context=128
                )
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.unload()
