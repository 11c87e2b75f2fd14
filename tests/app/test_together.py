"""Answers written together, where the model was loaded for several texts: the real engine, two chats and the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.services.host import Host
from app.services.progress import Answer
from app.store import Store
from core.settings.sampling import Sampling
from tests.app.conftest import WAIT_S, ended, follow
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

SHORT = Sampling(max_new_tokens=5, temperature=0.0)
ENDLESS = 3500  # tokens: much longer than any test waits for


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    torch.set_num_threads(1)
    model = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "model", max_position_embeddings=4096))
    host = Host(Store(tmp_path / "home"))
    assert host.models.change_many({"budget": "50%"}) == ""
    assert host.chats.set_sampling(max_new_tokens=ENDLESS, temperature=0.0) == ""
    loading = host.loader.load(host.loader.plan(str(model), context=4096, sequences=3, dtype="float32"))
    assert loading.join(WAIT_S) and not loading.error, loading.error
    host.models.ready().engine.prompt.ends.clear()  # type: ignore[attr-defined]
    yield host
    host.close()


def writing(answer: Answer, tokens: int = 3) -> Answer:
    follow(answer, lambda one: one.n_tokens >= tokens)
    return answer


def rows(host: Host) -> list[int]:
    """Sequences in each recorded pass that decoded, in order."""
    return [step.tokens for step in host.store.steps.records(load=host.models.load_id) if step.phase == "decode"]


def test_a_short_answer_does_not_wait_for_a_long_one(host: Host) -> None:
    alone = ended(host.chats.complete("slots keep what is used", SHORT)).text
    long = writing(host.chats.ask(None, "why do caches work"))
    assert ended(host.chats.complete("slots keep what is used", SHORT)).text == alone
    assert not long.finished, "the other one is still being written"
    host.chats.stop_answer(long)
    assert ended(long).stats is not None and long.stats.reason == "cancelled"
    assert max(rows(host)) == 2 and not host.busy


def test_each_pass_is_recorded_once(host: Host) -> None:
    long = writing(host.chats.ask(None, "why do caches work"))
    others = [host.chats.complete(f"slots keep what is used {n}", SHORT) for n in range(2)]
    for other in others:
        assert ended(other).stats is not None and other.stats.new_tokens == 5
    host.chats.stop_answer(long)
    ended(long)
    index = [step.index for step in host.store.steps.records(load=host.models.load_id)]
    assert index == sorted({*index}) and max(rows(host)) == 3


def test_a_stopped_answer_leaves_the_others(host: Host) -> None:
    first, second = (writing(host.chats.ask(None, text)) for text in ("why do caches work", "what is a router"))
    host.chats.stop_answer(first)
    ended(first)
    writing(second, second.n_tokens + 5)
    assert not second.finished
    host.chats.stop_answer(second)
    ended(second)


def test_a_refused_prompt_ends_alone_and_the_chat_goes_on_from_its_kv(host: Host) -> None:
    long = writing(host.chats.ask(None, "why do caches work"))
    refused = ended(host.chats.complete("why " * 4100, SHORT))
    assert refused.state == "error" and refused.too_long and "context" in refused.error
    assert not long.finished
    host.chats.stop_answer(long)
    ended(long)
    assert host.chats.set_sampling(max_new_tokens=4) == ""
    again = ended(host.chats.ask(long.chat_id, "and why else"))
    assert again.stats is not None and again.stats.cached_tokens > 0


def test_a_chat_beside_another_goes_on_from_its_own_kv(host: Host) -> None:
    assert host.chats.set_sampling(max_new_tokens=5) == ""
    chat = ended(host.chats.ask(None, "what is a router")).chat_id
    assert host.chats.set_sampling(max_new_tokens=ENDLESS) == ""
    long = writing(host.chats.ask(None, "why do caches work"))
    assert host.chats.set_sampling(max_new_tokens=5) == ""
    for turn in ("and a cache", "and a slot"):
        again = ended(host.chats.ask(chat, turn))
        assert again.stats is not None and 0 < again.stats.cached_tokens < again.stats.prompt_tokens
        assert again.prefill_cached == again.stats.cached_tokens and not long.finished
    host.chats.stop_answer(long)
    ended(long)
