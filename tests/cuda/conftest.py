"""Engines on a fake GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.capacity.sizes import PREFILL_CHUNK
from core.engine import Engine
from core.importing import import_model
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import make_checkpoint
from tests.fake_cuda import FakeCuda, installed
from tests.loaded import unloading
from tests.tiny_tokenizer import save_tokenizer

CONTEXT = 256


@pytest.fixture(scope="session", autouse=True)
def _loads_try_a_short_prompt() -> Iterator[None]:
    """What a load tries to measure its workspace: 4 tokens instead of a whole context, as the fake GPU's segments are
    much larger than what either takes. Tests of the memory itself ask for `whole_trials`."""
    from core.engine import pass_wiring

    before, pass_wiring.PREFILL_CHUNK = pass_wiring.PREFILL_CHUNK, 4  # type: ignore[attr-defined]
    yield
    pass_wiring.PREFILL_CHUNK = before  # type: ignore[attr-defined]


@pytest.fixture
def whole_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads try a prompt as long as those that they serve."""
    monkeypatch.setattr("core.engine.pass_wiring.PREFILL_CHUNK", PREFILL_CHUNK)


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """A GPU of 1 GiB in an idle machine. That no access to it was a race is asserted at the end."""
    with installed(FakeCuda()) as fake:
        yield fake
    assert not fake.races.found, fake.races.found[:3]


@pytest.fixture
def fake_kernels() -> Iterator[FakeCuda]:
    """As `fake_cuda`, with kernels in the place of Triton's."""
    with installed(FakeCuda(), kernels=True) as fake:
        yield fake
    assert not fake.races.found, fake.races.found[:3]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("cuda_model"), num_experts=16))


@pytest.fixture(scope="session")
def pack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_model(str(model), tmp_path_factory.mktemp("cuda_pack") / "pack", format="int4-g32")


@contextmanager
def engine_on(path: Path, settings: Mapping[str, object], **choices: object) -> Iterator[Engine]:
    """An engine on the GPU, unloaded at the end."""
    spec = LoadSpec.checked(str(path), Settings(settings), device="cuda", context=CONTEXT, **choices)
    with unloading(Engine.load(spec)) as engine:
        yield engine
