"""The fixture `caplog`, as tests here use it. pytest's own plugin visits every logger of every library six times a
test, which takes seconds of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Logged(logging.Handler):
    """What was logged during a test."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
        self.records.append(record)

    @contextmanager
    def at_level(self, level: int, logger: str | None = None) -> Iterator[None]:
        """Within, records of this level reach it, too."""
        one = logging.getLogger(logger)
        before = one.level
        one.setLevel(level)
        try:
            yield
        finally:
            one.setLevel(before)


@pytest.fixture
def caplog() -> Iterator[Logged]:
    logged, root = Logged(), logging.getLogger()
    root.addHandler(logged)
    yield logged
    root.removeHandler(logged)
