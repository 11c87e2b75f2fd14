"""Answers during which something fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.services.host import Host
from app.store import StoreError
from core.errors import MoestroError
from core.settings.sampling import Sampling
from core.types import Piece
from tests.app.conftest import QuickEngine, ended, open_host, texts


class BrokenEngine(QuickEngine):
    """Breaks at the fourth token of its first answer."""

    def generate(
        self,
        messages: Sequence[Mapping[str, str]] | str,
        sampling: Sampling,
        cancel: threading.Event | None = None,
        **how: object,
    ) -> Iterator[Piece]:
        first = not self._steps
        for number, piece in enumerate(super().generate(messages, sampling, cancel)):
            if first and number == 4:
                raise ZeroDivisionError("slot 7 of nothing")
            yield piece


def test_an_unexpected_error_mid_answer_is_told_plainly_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host(tmp_path, BrokenEngine)
    with caplog.at_level(logging.ERROR, "moestro.app"):
        answer = ended(host.chats.ask(None, "hello"))
    assert answer.state == "error"
    assert "error inside Moestro" in answer.error
    assert "slot 7" not in answer.error
    assert "builtins.ZeroDivisionError" in caplog.text and "test_host_errors.py" in caplog.text
    assert texts(host, answer.chat_id)[1] == ("assistant", "the cache keeps ", "error")
    assert QuickEngine.together == BrokenEngine.together == 0, "the broken answer still holds the engine"
    assert answer.chat_id is not None
    again = ended(host.chats.regenerate(answer.chat_id))
    assert (again.state, again.n_tokens) == ("done", 12)
    host.close()


def test_a_store_that_fails_mid_answer_costs_no_word(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = host.store.token, 0

    def token(*args: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise StoreError("Moestro could not save: the disk failed.")
        return original(*args)

    monkeypatch.setattr(host.store, "token", token)
    answer = ended(host.chats.ask(None, "hello"))
    assert (answer.state, answer.error, answer.unsaved, answer.n_tokens) == ("done", "", "", 12)
    assert texts(host, answer.chat_id)[1] == ("assistant", answer.text, "done")
    assert len(answer.text.split()) == 12
    assert ended(host.chats.ask(answer.chat_id, "again")).error == ""


def test_an_answer_that_breaks_off_lets_go_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []  # a reference, so that only an explicit close can end the generator

    class Kept(QuickEngine):
        def generate(
            self,
            messages: Sequence[Mapping[str, str]] | str,
            sampling: Sampling,
            cancel: threading.Event | None = None,
            **how: object,
        ) -> Iterator[Piece]:
            kept.append(super().generate(messages, sampling, cancel))
            return iter(kept[-1])

    def broken(*args: Any) -> None:
        raise MoestroError("It does not go on.")

    host = open_host(tmp_path, Kept)
    monkeypatch.setattr(host.regret, "add", broken)
    answer = ended(host.chats.ask(None, "hello"))
    assert (answer.error, answer.undone) == ("It does not go on.", True)
    assert kept[0].gi_frame is None, "the generator is still open and with it the engine's leases"
    host.close()
