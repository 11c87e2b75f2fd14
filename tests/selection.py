"""Which tests run: those marked `long` only with `--all`, or when a marker expression (`-m`) names `long`.

A pytest plugin that imports nothing heavy; tests/conftest.py takes its two hooks over.
"""

from __future__ import annotations

import re

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked `long`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Any other marker expression, such as `-m gpu`, selects among the tests that run by default."""
    if config.getoption("--all") or re.search(r"\blong\b", str(config.getoption("markexpr", ""))):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
