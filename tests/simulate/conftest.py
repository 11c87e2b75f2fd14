"""The bundled model, loaded once for all tests of the simulator against the engine."""

from collections.abc import Iterator

import pytest

from core.engine import Engine
from tests.loaded import loaded


@pytest.fixture(scope="session")
def demo() -> Iterator[Engine]:
    with loaded("demo", {"budget": "50%", "link": "own"}, device="cpu") as engine:
        yield engine
