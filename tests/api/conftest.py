"""A server of the API over the fake engine, which says what a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.services.host import Host
from core.settings.sampling import Sampling
from core.types import Piece
from tests.app.conftest import GatedEngine, QuickEngine, open_host
from tests.app.served import EndlessEngine, serving

HOME = "http://127.0.0.1:7860"


class SayingEngine(QuickEngine):
    says_once = True
    asked: list[tuple[Any, Sampling]]

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        self.asked.append((messages, sampling))
        yield from super().generate(messages, sampling, cancel, **how)


def saying(text: str, **more: Any) -> type[SayingEngine]:
    words = tuple(text[at : at + 3] for at in range(0, len(text), 3))
    return type("Saying", (SayingEngine,), {"words": words, "asked": [], **more})


Start = Callable[..., tuple[TestClient, Host, type[SayingEngine]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server whose engine says a text: start(text, takes_tools=True) -> client, host, engine class."""
    ends: list[Callable[[], object]] = []

    def started(text: str = "Caches work.", **more: Any) -> tuple[TestClient, Host, type[SayingEngine]]:
        engine = saying(text, **more)
        host = open_host(tmp_path, engine)
        assert host.chats.set_sampling(max_new_tokens=1000) == ""
        client = TestClient(build_app(host), base_url=HOME)
        ends.extend([host.close, client.close])
        return client, host, engine

    yield started
    for end in reversed(ends):
        end()


@pytest.fixture
def gated() -> type[GatedEngine]:
    return type("Gated", (GatedEngine,), {"gate": threading.Semaphore(0)})


@pytest.fixture
def endless() -> type[EndlessEngine]:
    return EndlessEngine.fresh()


@pytest.fixture
def busy_host(tmp_path: Path, endless: type[EndlessEngine]) -> Iterator[Host]:
    host = open_host(tmp_path, endless)
    yield host
    host.close()


@pytest.fixture
def port(busy_host: Host) -> Iterator[int]:
    def pool(app: FastAPI) -> None:
        @app.get("/threads-in-use")
        async def in_use() -> float:
            return anyio.to_thread.current_default_thread_limiter().statistics().borrowed_tokens

    with serving(build_app(busy_host, pool)) as port:
        yield port


Refusing = tuple[TestClient, type[SayingEngine]]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusing]:
    """(client, engine class) of one server for requests of which none reaches the engine."""
    engine = saying("Caches work.")
    host = open_host(tmp_path_factory.mktemp("home"), engine)
    with TestClient(build_app(host), base_url=HOME) as client:
        yield client, engine
    host.close()


def events(text: str) -> list[tuple[str, Any]]:
    """(name, data) of the server-sent events of a stream, without comments; the data of OpenAI's last is "[DONE]"."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
