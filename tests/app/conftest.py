"""A host over the fake engine, in a folder of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from app.services.host import Host
from app.services.progress import Answer
from app.store import Store
from core.settings.loading import LoadSpec
from core.types import Piece
from tests.fake_models import fake_estimate, fake_pack
from tests.fakes import FakeEngine

Awaited = TypeVar("Awaited", Answer, Any)
WAIT_S = 60.0  # for what should take milliseconds; only a failing test waits so long


class QuickEngine(FakeEngine):
    """The fake engine without its pauses. Counts how many answers are generated at once."""

    together = 0
    most_together = 0

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec, token_s=0.0)

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        kind = type(self)
        kind.together += 1
        kind.most_together = max(kind.most_together, kind.together)
        counted = True
        try:
            for piece in super().generate(messages, sampling, cancel):
                if piece.kind == "end":  # who reads it may begin the next answer before this generator is closed
                    kind.together, counted = kind.together - 1, False
                yield piece
        finally:
            kind.together -= counted


class GatedEngine(QuickEngine):
    """Makes a token only when the test lets it: `gate.release(n)` lets n through. A stop opens the gate, too."""

    gate = threading.Semaphore(0)

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        for piece in super().generate(messages, sampling, cancel):
            yield piece
            if piece.kind != "end":
                while not cancel.is_set() and not self.gate.acquire(timeout=0.01):
                    pass


def follow(answer: Answer, until: Callable[[Answer], bool]) -> None:
    """Wait as a tab does, until the answer is as wanted."""
    version = -1
    while not until(answer):
        seen = version
        version = answer.wait(version, WAIT_S)
        assert version != seen or answer.finished, f"nothing happened: {answer.state}, {answer.n_tokens} tokens"
        assert until(answer) or not answer.finished, f"it ended: {answer.state} {answer.error}"


def ended(awaited: Awaited) -> Awaited:
    assert awaited.join(3 * WAIT_S), f"still {awaited.state}"
    return awaited


def asked(host: Host, chat: int | None = None, text: str = "hello") -> int:
    """The chat of a question that has been answered."""
    answer = ended(host.chats.ask(chat, text))
    assert answer.error == "" and answer.chat_id is not None
    return answer.chat_id


def texts(host: Host, chat: int | None) -> list[tuple[str, str, str]]:
    assert chat is not None
    return [(m.role, m.text, m.state) for m in host.chats.messages(chat)]


@pytest.fixture
def gated() -> type[GatedEngine]:
    return type("Gated", (GatedEngine,), {"gate": threading.Semaphore(0), "together": 0, "most_together": 0})


@contextmanager
def page() -> Iterator[None]:
    """What is made inside is on a page of Gradio's, for which no server is built: that takes longer than most tests."""
    from gradio import Blocks
    from gradio.routes import App

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "create_app", lambda *_, **__: None)
        with Blocks():
            yield


OPENED: list[Host | Store] = []


@pytest.fixture(autouse=True)
def _what_a_test_opened_is_closed() -> Iterator[None]:
    before = len(OPENED)
    yield
    while len(OPENED) > before:
        OPENED.pop().close()


def open_store(folder: Path, *room: Callable[[Path], int]) -> Store:
    OPENED.append(store := Store(folder, *room))
    return store


def open_host(
    folder: Path, engine: type[FakeEngine] = QuickEngine, *, loaded: bool = True, tokens: int = 12, **services: Any
) -> Host:
    """A host on the store in `folder`, with the fake model loaded unless told otherwise; answers have so many tokens.
    `services` as Host has them."""
    OPENED.append(host := Host(Store(folder), engine, fake_estimate, **services))
    assert host.chats.set_sampling(max_new_tokens=tokens) == ""
    if loaded:
        assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
        assert host.loader.loading.error == ""
    return host


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return open_host(tmp_path)


@pytest.fixture
def gated_host(tmp_path: Path, gated: type[GatedEngine]) -> Host:
    return open_host(tmp_path, gated)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache of this test's own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def library(tmp_path: Path) -> Host:
    host = open_host(tmp_path / "home", loaded=False)
    fake_pack(host.library.packs / "Tiny")
    return host
