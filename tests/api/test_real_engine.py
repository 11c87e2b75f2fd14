"""The API over the engine itself: a client that leaves, or a template that never ends, holds up nobody else."""

import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from app.server.api import build_app
from app.services import plan_basis
from app.services.host import Host
from app.services.progress import Answer
from app.store import Store
from core.engine import Engine
from core.engine.prompt import QUICK_CHARS
from core.profile.trace.chunk import RANKED
from core.types import StepRecord
from tests.app.conftest import WAIT_S
from tests.app.served import eventually, post, serving
from tests.checkpoints import make_checkpoint
from tests.client.process import ROOT, Server
from tests.engine.profiles import drawn_profile
from tests.loaded import in_layers
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
    with in_layers(engine, routed):
        client = post(port, {"messages": HELLO, "stream": stream})
        assert reached.wait(WAIT_S)
        client.close()
        eventually(lambda: answers[0].finished)
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


def test_a_plan_while_idle_follows_what_the_engine_predicted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, add = list[StepRecord](), host.routed.add

    def added(load: int, step: StepRecord, experts: int) -> None:
        steps.append(step)
        add(load, step, experts)

    monkeypatch.setattr(plan_basis, "ENOUGH", 30)
    monkeypatch.setattr(host.routed, "add", added)
    engine = host.models.loaded.engine  # type: ignore[union-attr]
    layers, experts, k = engine.shape.layers, engine.shape.experts, engine.shape.top_k
    times = {"att": 0.1, "moe": 0.1, "head": 0.1, "load": 0.1}
    curves = np.zeros((layers, experts + 1), np.float32), np.zeros((layers, 1), np.float32)
    profile = replace(drawn_profile(engine), times=times)
    profile = replace(profile, curve_hit=curves[0], curve_chosen=curves[1], curve_cached=curves[0][..., None])
    engine.use_profile(profile)
    wanted = {"predictor": "gate", "predictor.width": 256, "predictor.gate.last_state": True, "prefetch_auto": False}
    assert host.models.change_many(wanted) == ""
    host.replanner.switch(True)
    answer = host.chats.ask(None, "hello there")
    assert answer.join(WAIT_S) and not answer.error
    known = host.planner.propose().known
    host.replanner.switch(False)
    assert "what was predicted" in known.basis

    decoded = [step for step in steps if step.phase == "decode" and step.tokens == 1]
    right = np.zeros((layers, experts))
    for before, step in itertools.pairwise(steps):
        if step not in decoded:
            continue
        for layer in range(layers):
            source = step if layer else before
            rows = source.ranked if source.ranked is not None else np.zeros(0, RANKED)
            for place, row in enumerate(rows[rows["layer"] == layer]):
                right[layer, place] += row["expert"] in step.ids[layer, 0]
    assert len(decoded) > 30 and right.sum() > 0.9 * len(decoded) * layers * k
    ranks = known.curves.chosen.shape[1]
    assert known.curves.chosen == pytest.approx(right[:, :ranks] / len(decoded)) and not right[:, ranks:].any()
    assert known.curves.cached[:, -1].min() > 0.9, "a cache of all experts has every one that is ranked"


FREEZES = (
    "{% if 'freeze' in messages[-1].content %}{% set x = messages | length + 8 %}{{ x ** (x ** x) }}{% endif %}"
    "{{ messages[-1].content }}"
)
HEALTHY_S, END_S = 1.0, 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = shutil.copytree(ROOT / "assets" / "demo", tmp_path / "model")
    (model / "chat_template.jinja").write_text(FREEZES)
    with Server(tmp_path / "home", ("--model", str(model))) as server:
        yield server


def chat(server: Server, text: str) -> tuple[int, bytes]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    connection = server.http.send("/v1/chat/completions", body)
    try:
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (OSError, HTTPException):
        return 0, b"the server ended"
    finally:
        connection.close()


def health(server: Server) -> dict[str, Any]:
    began_s = time.monotonic()
    found: dict[str, Any] = server.http.json("/healthz")
    assert time.monotonic() - began_s < HEALTHY_S
    return found


def busy(server: Server) -> None:
    while not health(server)["busy"]:
        time.sleep(0.01)


@pytest.mark.long(0.5)
def test_the_server_goes_on_and_ends_when_it_is_told_to(server: Server) -> None:
    with ThreadPoolExecutor(4) as clients:
        frozen = clients.submit(chat, server, "freeze")
        busy(server)
        other = clients.submit(chat, server, "hello")
        while not frozen.done():
            health(server)
            time.sleep(0.02)
        status, said = frozen.result()
        assert (status, b"was stopped: it did not end within 2 seconds" in said) == (400, True), said
        status, said = other.result()
        assert (status, b'"content"' in said) == (200, True), said
        texts = ("freeze", "freeze" + "!" * QUICK_CHARS, "freeze")  # the long one is rendered in a thread of its own
        waiting = [clients.submit(chat, server, text) for text in texts]
        busy(server)
        server.process.send_signal(signal.SIGTERM)
        if os.name == "posix":
            assert server.process.wait(END_S) == 0
        assert all(one.result()[0] != 200 for one in waiting)
