"""A trace of drawn routing, and what a command prints."""

from pathlib import Path

import numpy as np
import pytest

from tests.cli.printed import EXPERTS, LAYERS, K
from tests.simulate.test_engine import routes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    np.savez(tmp_path / "t.npz", experts=routes(0, 200, EXPERTS, LAYERS, K).transpose(1, 0, 2))
    return tmp_path / "t.npz"
