"""What stands in for a loaded model, and answers every line at once."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.services.batch.lines import Line
from app.services.batch.records import answered


class Echo:
    """A backend in the place of `app.server.v1.batch.ByEngine`."""

    def __init__(self, *given: Any, **more: Any) -> None:
        pass

    def run(self, lines: Iterable[Line], put: Callable[[dict[str, Any]], None]) -> Iterator[int]:
        for line in lines:
            text = f"to {line.body['messages'][-1]['content']}" if line.body else ""
            body = {"id": "r", "choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}}
            put(answered(line, body))
            yield 3


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `batch` loads nothing, and answers with what it was asked."""
    engine = SimpleNamespace(one_at_a_time="", unload=lambda: None)
    monkeypatch.setattr("app.cli.chat.load", lambda spec: engine)
    monkeypatch.setattr("app.server.v1.batch.ByEngine", Echo)
