"""A prompt that was read before: the engine is asked to reuse it, and what it reused is shown, told and exported."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import answer_state
from app.services.exports.answers import answers
from app.services.host import Host
from app.ui.tabs.messages import statistics
from core.settings.sampling import Sampling
from core.types import Piece
from tests.app.conftest import QuickEngine, ended, open_host


class Remembering(QuickEngine):
    """Says that all but two tokens of a prompt were taken over, if it is asked to take over any."""

    def generate(
        self,
        messages: Sequence[Mapping[str, str]] | str,
        sampling: Sampling,
        cancel: threading.Event | None = None,
        **how: object,
    ) -> Iterator[Piece]:
        for piece in super().generate(messages, sampling, cancel, **how):
            if how.get("reuse") and piece.kind == "prefill":
                assert piece.step is not None
                piece.step.cached_tokens = piece.total - 2
                yield Piece("prefill", done=piece.total - 2, total=piece.total, cached=piece.total - 2)
                piece = replace(piece, cached=piece.total - 2)
            if how.get("reuse") and piece.stats is not None:
                stats = replace(piece.stats, cached_tokens=piece.stats.prompt_tokens - 2)
                piece = replace(piece, stats=stats)
            yield piece


@pytest.fixture
def remembering(tmp_path: Path) -> Iterator[Host]:
    host = open_host(tmp_path, Remembering)
    yield host
    host.close()


def test_while_it_is_read_under_the_answer_and_in_the_export(remembering: Host) -> None:
    answer = ended(remembering.chats.ask(None, "one two three"))
    assert answer.chat_id is not None and answer.prefill_cached == 4
    told = answer_state(answer, None, 0)
    assert told is not None and (told["cached"], told["total"]) == (4, 6)
    assert "prompt: reused 4, read 2" in statistics(remembering.chats.messages(answer.chat_id)[-1])
    load = remembering.models.load_id
    assert load is not None
    assert [step.cached_tokens for step in remembering.store.steps.records(load=load)][:2] == [4, 0]
    with remembering.store.db.reader() as db:
        assert answers(db, load, None)["cached_tokens"].tolist() == [4]


def test_in_the_usage_of_the_api(remembering: Host) -> None:
    with TestClient(build_app(remembering), base_url="http://127.0.0.1:7860") as client:
        ask = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 2}
        usage = client.post("/v1/chat/completions", json=ask).json()["usage"]
    assert usage["prompt_tokens"] == 6 and usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_nothing_is_said_of_a_prompt_that_was_read_whole(host: Host) -> None:
    answer = ended(host.chats.ask(None, "one two three"))
    assert answer.chat_id is not None and "reused" not in statistics(host.chats.messages(answer.chat_id)[-1])


def test_how_far_a_prompt_is_read_shows_within_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.writer.READING_S", 0.0)
    seen: list[tuple[int, int, str]] = []

    class Reading(QuickEngine):
        def generate(
            self,
            messages: Sequence[Mapping[str, str]] | str,
            sampling: Sampling,
            cancel: threading.Event | None = None,
            **how: Any,
        ) -> Iterator[Piece]:
            for done in (100, 200):
                how["reading"](Piece("prefill", done=done, total=400, cached=50))
                told = answer_state(host.chats.answer(1), None, 0)
                assert told is not None
                seen.append((told["done"], told["total"], told["state"]))
            yield from super().generate(messages, sampling, cancel)

    host = open_host(tmp_path, Reading)
    ended(host.chats.ask(None, "one two three"))
    assert seen == [(100, 400, "prefill"), (200, 400, "prefill")]
    host.close()
