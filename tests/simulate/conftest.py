"""The bundled model, loaded once for all tests of the simulator against the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec


@pytest.fixture(scope="session")
def demo() -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked("demo", Settings({"budget": "50%", "link": "own"}), device="cpu"))
    yield engine
    engine.unload()
