"""The API over the engine itself, with a tiny model: a client that leaves stops it within a layer, whatever it is
doing; and what the fake engine says of itself, the engine says too."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.server.api import build_app
from app.services.host import Host
from app.services.progress import Answer
from app.store import Store
from core.engine import Engine
from tests.app.conftest import WAIT_S
from tests.app.served import eventually, post, serving
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    torch.set_num_threads(1)
    model: Path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("chat_model")))
    host = Host(Store(tmp_path_factory.mktemp("home")))
    assert host.chats.set_sampling(max_new_tokens=40) == ""
    loading = host.loader.load(host.loader.plan(str(model), context=256))
    assert loading.join(WAIT_S) and not loading.error, loading.error
    yield host
    host.close()


@pytest.fixture(scope="module")
def port(host: Host) -> Iterator[int]:
    with serving(build_app(host)) as port:
        yield port


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("passes", [0, 3])  # whole ones before: 0, its prompt is being read
def test_a_client_that_leaves_stops_the_engine_within_a_layer(
    host: Host, port: int, monkeypatch: pytest.MonkeyPatch, stream: bool, passes: int
) -> None:
    engine, answers, layers, reached = host.models.loaded.engine, list[Answer](), list[int](), threading.Event()
    assert isinstance(engine, Engine)
    complete = host.chats.complete

    def kept(*asked: Any) -> Answer:
        answers.append(complete(*asked))
        return answers[0]

    def routed(layer: int) -> None:
        layers.append(layer)
        if len(layers) == passes * engine.shape.layers + 2:  # the second layer of the next pass
            eventually(lambda: bool(answers))
            reached.set()
            assert answers[0].cancelled.wait(WAIT_S)

    monkeypatch.setattr(host.chats, "complete", kept)
    hooks = [
        site.module.register_forward_pre_hook(lambda *_, layer=site.index: routed(layer))
        for site in engine.loaded.sites
    ]
    client = post(port, {"messages": HELLO, "stream": stream})
    assert reached.wait(WAIT_S)
    client.close()
    eventually(lambda: answers[0].finished)
    for hook in hooks:
        hook.remove()
    assert len(layers) == passes * engine.shape.layers + 2, "a layer was computed after the client had left"
    assert answers[0].n_tokens == passes
    assert answers[0].stats is not None and answers[0].stats.reason == "cancelled"
    eventually(lambda: not host.busy)
    engine.expert_cache.check_integrity()


def test_an_answer_of_the_engine_in_every_form(host: Host, port: int) -> None:
    url, few = f"http://127.0.0.1:{port}", {"temperature": 1.0, "seed": 3}

    def ask(path: str, **body: Any) -> dict[str, Any]:
        reply = httpx.post(f"{url}/v1/{path}", json={**few, **body}, timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    chat = ask("chat/completions", messages=HELLO, max_tokens=9, logprobs=True, top_logprobs=3)
    said = chat["choices"][0]["message"]["content"]
    assert len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"] == 9
    assert (chat["moestro"]["exact"], chat["seed"]) == (True, 3)
    assert ask("messages", messages=HELLO, max_tokens=9)["usage"]["output_tokens"] == 9
    text = "u:hello there\na:"  # what the template makes of the chat
    assert ask("completions", prompt=text, max_tokens=9)["choices"][0]["text"] == said
    assert ask("responses", input=HELLO, max_output_tokens=9)["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json={"messages": HELLO}, timeout=WAIT_S).json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}
    assert httpx.get(f"{url}/v1/models", timeout=WAIT_S).json()["data"][0]["max_model_len"] == 256
    assert "moestro_hits_total{" in httpx.get(f"{url}/metrics", timeout=WAIT_S).text


def test_what_the_model_cannot_take_is_refused(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for body, told in (
        ({"tools": [tool]}, "takes no tools"),
        ({"response_format": {"type": "json_object"}}, "JSON schema"),  # the tiny tokenizer has no end token
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "the context holds 256"),
    ):
        reply = httpx.post(url, json={"messages": HELLO, **body}, timeout=WAIT_S)
        assert (reply.status_code, told in reply.text) == (400, True), reply.text
    lines = httpx.post(
        url, json={"messages": [{"role": "user", "content": "x" * 300}], "stream": True}, timeout=WAIT_S
    ).text
    error = json.loads(lines.split("data: ")[-2])["error"]
    assert error["code"] == "context_length_exceeded"
