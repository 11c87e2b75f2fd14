"""Servers that a test starts, and that end with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.batch.misbehaving import Misbehaving, Script, serving

Serve = Callable[[Script], Misbehaving]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as servers:
        yield lambda script: servers.enter_context(serving(script))
