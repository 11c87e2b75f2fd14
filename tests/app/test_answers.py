"""What an answer is recorded with and shows: its seed, the prompt that was reused, those beside it."""

import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import answer_state
from app.services.exports.answers import answers
from app.services.host import Host
from app.services.progress import Answer
from app.store import Store
from app.ui.tabs.messages import statistics
from core.settings.sampling import Sampling
from core.types import Piece
from tests.app.conftest import WAIT_S, QuickEngine, asked, ended, follow, open_host
from tests.app.served import ask
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer


def test_every_answer_has_a_seed_in_store_line_and_export(host: Host) -> None:
    assert host.chats.sampling.seed == -1
    assert host.chats.set_sampling(temperature=0.5, top_k=7) == ""
    chat = asked(host, None, "first")
    ended(host.chats.ask(chat, "second"))
    assert host.chats.set_sampling(seed=11, temperature=0) == ""
    ended(host.chats.ask(chat, "third"))
    told = [m for m in host.chats.messages(chat) if m.role == "assistant"]
    drawn = [m.stats and m.stats["sampling"] for m in told]
    assert [(one["temperature"], one["top_k"]) for one in drawn if one] == [(0.5, 7), (0.5, 7), (0.0, 7)]
    seeds = [m.stats["seed"] for m in told if m.stats]
    assert seeds == [one["seed"] for one in drawn if one]
    assert seeds[2] == 11
    assert len(set(seeds)) == 3, "the same random seed twice"
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert f"seed {seeds[0]}" in statistics(told[0])
    assert "seed" not in statistics(told[2]), "without sampling nothing hangs on it"
    with TestClient(build_app(host), base_url="http://127.0.0.1") as client:
        archive = zipfile.ZipFile(io.BytesIO(client.get(f"/export/{chat}.zip").content))
    rows = pd.read_csv(archive.open("answers.csv"))
    assert rows["seed"].tolist() == seeds
    assert rows["top_k"].tolist() == [7, 7, 7]
    assert rows["temperature"].tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(("asked", "told"), [({"seed": 5}, 5), ({}, None), ({"seed": -1}, None)])
def test_the_api_says_which_seed_it_used(host: Host, asked: dict[str, int], told: int | None) -> None:
    with TestClient(build_app(host), base_url="http://127.0.0.1") as client:
        whole = client.post("/v1/chat/completions", json=ask("hello", max_tokens=1, **asked)).json()["seed"]
        lines = client.post("/v1/chat/completions", json=ask("hello", max_tokens=1, stream=True, **asked)).text
    streamed = json.loads(lines.split("data: ")[-2])["seed"]
    assert (whole, streamed) == (told, told) if told is not None else whole != streamed


class Remembering(QuickEngine):
    """Says that all but two tokens of a prompt were taken over, if it is asked to take over any."""

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        for piece in super().generate(messages, sampling, cancel, **how):
            if how.get("reuse") and piece.kind == "prefill":
                piece.step.cached_tokens = piece.total - 2
                yield Piece("prefill", done=piece.total - 2, total=piece.total, cached=piece.total - 2)
                piece = replace(piece, cached=piece.total - 2)
            if how.get("reuse") and piece.stats is not None:
                stats = replace(piece.stats, cached_tokens=piece.stats.prompt_tokens - 2)
                piece = replace(piece, stats=stats)
            yield piece


@pytest.fixture
def remembering(tmp_path: Path) -> Host:
    return open_host(tmp_path, Remembering)


def test_what_was_reused_is_told_wherever_it_shows(remembering: Host) -> None:
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
    with TestClient(build_app(remembering), base_url="http://127.0.0.1:7860") as client:
        usage = client.post("/v1/chat/completions", json=ask("one two three", max_tokens=2)).json()["usage"]
    assert usage["prompt_tokens"] == 6 and usage["prompt_tokens_details"] == {"cached_tokens": 4}


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
                seen.append((told["done"], told["total"], told["state"]))
            yield from super().generate(messages, sampling, cancel)

    host = open_host(tmp_path, Reading)
    ended(host.chats.ask(None, "one two three"))
    assert seen == [(100, 400, "prefill"), (200, 400, "prefill")]


SHORT = Sampling(max_new_tokens=5, temperature=0.0)
ENDLESS = 3500  # tokens: much longer than any test waits for


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("real")
    torch.set_num_threads(1)
    model = save_tokenizer(make_checkpoint("qwen3_moe", folder / "model", max_position_embeddings=4096))
    host = Host(Store(folder / "home"))
    assert host.models.change_many({"budget": "50%", "drafts": "off"}) == ""  # a row is a sequence
    loading = host.loader.load(host.loader.plan(str(model), context=4096, sequences=3, dtype="float32"))
    assert loading.join(WAIT_S) and not loading.error, loading.error
    host.models.ready().engine.prompt.ends.clear()  # type: ignore[attr-defined]
    yield host
    host.close()


@pytest.fixture
def two_at_once(real: Host) -> Host:
    assert real.chats.set_sampling(max_new_tokens=ENDLESS, temperature=0.0) == "" and not real.busy
    return real


def writing(answer: Answer, tokens: int = 3) -> Answer:
    follow(answer, lambda one: one.n_tokens >= tokens)
    return answer


def test_a_short_answer_does_not_wait_for_a_long_one(two_at_once: Host) -> None:
    """And each pass is recorded once."""
    alone = ended(two_at_once.chats.complete("slots keep what is used", SHORT)).text
    long = writing(two_at_once.chats.ask(None, "why do caches work"))
    assert ended(two_at_once.chats.complete("slots keep what is used", SHORT)).text == alone
    assert not long.finished, "the other one is still being written"
    others = [two_at_once.chats.complete(f"slots keep what is used {n}", SHORT) for n in range(2)]
    for other in others:
        assert ended(other).stats is not None and other.stats.new_tokens == 5
    two_at_once.chats.stop_answer(long)
    assert ended(long).stats is not None and long.stats.reason == "cancelled" and not two_at_once.busy
    steps = list(two_at_once.store.steps.records(load=two_at_once.models.load_id))
    index = [step.index for step in steps]
    assert index == sorted({*index}) and {step.tokens for step in steps if step.phase == "decode"} == {1, 2, 3}


def test_a_stopped_answer_leaves_the_others(two_at_once: Host) -> None:
    first, second = (writing(two_at_once.chats.ask(None, text)) for text in ("why do caches work", "what is a router"))
    two_at_once.chats.stop_answer(first)
    ended(first)
    writing(second, second.n_tokens + 5)
    assert not second.finished
    two_at_once.chats.stop_answer(second)
    ended(second)


def test_a_refused_prompt_ends_alone_and_the_chat_goes_on_from_its_kv(two_at_once: Host) -> None:
    long = writing(two_at_once.chats.ask(None, "why do caches work"))
    refused = ended(two_at_once.chats.complete("why " * 4100, SHORT))
    assert refused.state == "error" and refused.too_long and "context" in refused.error
    assert not long.finished
    two_at_once.chats.stop_answer(long)
    ended(long)
    assert two_at_once.chats.set_sampling(max_new_tokens=4) == ""
    again = ended(two_at_once.chats.ask(long.chat_id, "and why else"))
    assert again.stats is not None and again.stats.cached_tokens > 0


def test_a_chat_beside_another_goes_on_from_its_own_kv(two_at_once: Host) -> None:
    assert two_at_once.chats.set_sampling(max_new_tokens=5) == ""
    chat = ended(two_at_once.chats.ask(None, "what is a router")).chat_id
    assert two_at_once.chats.set_sampling(max_new_tokens=ENDLESS) == ""
    long = writing(two_at_once.chats.ask(None, "why do caches work"))
    assert two_at_once.chats.set_sampling(max_new_tokens=5) == ""
    for turn in ("and a cache", "and a slot"):
        again = ended(two_at_once.chats.ask(chat, turn))
        assert again.stats is not None and 0 < again.stats.cached_tokens < again.stats.prompt_tokens
        assert again.prefill_cached == again.stats.cached_tokens and not long.finished
    two_at_once.chats.stop_answer(long)
    ended(long)
