"""What tests of benches share."""

import sys
from pathlib import Path

import pytest

from bench.models import peers


@pytest.fixture
def other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of `tests.bench.other` in place of other programs, and the model's own file in place of theirs."""

    def gguf(folder: Path, model: Path, kind: str, python: Path, say: object) -> Path:
        assert kind in ("Q4_0", "Q4_K_M", "BF16")
        return next(model.glob("*.safetensors"))

    monkeypatch.setattr(peers, "WORKER", "tests.bench.other")
    monkeypatch.setattr(peers, "interpreter", lambda folder: Path(sys.executable))
    monkeypatch.setattr(peers, "installed", lambda python: True)
    monkeypatch.setattr(peers, "gguf", gguf)
