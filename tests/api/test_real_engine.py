"""The API over the engine itself, with a tiny model: a client that leaves stops it within a layer, whatever it is
doing; and what the fake engine says of itself, the engine says too."""

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
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
from core.profile.trace.chunk import RANKED
from core.types import StepRecord
from tests.app.conftest import WAIT_S
from tests.app.served import eventually, post, serving
from tests.checkpoints import make_checkpoint
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
