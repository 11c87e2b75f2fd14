"""While an answer is read, waited for or written: comments keep the connection, and a client that leaves ends it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.server.api import build_app
from app.server.v1 import reply
from app.services.host import Host
from tests.app.conftest import WAIT_S, GatedEngine, open_host
from tests.app.served import ENDLESS, EndlessEngine, eventually, post, serving
from tests.selection import layered

FORMS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def ask(text: str, stream: bool) -> dict[str, Any]:
    """A request that every form takes."""
    return {"messages": [{"role": "user", "content": text}], "input": text, "stream": stream}


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
    with serving(build_app(busy_host)) as port:
        yield port


@pytest.mark.parametrize(
    ("path", "stream", "phase"),
    layered(
        itertools.product(FORMS, (False, True), ("talk", "read")),
        quick=lambda case: (FORMS.index(case[0]) + case[1] + (case[2] == "talk")) % 2 == 0,
    ),
)
def test_the_engine_stops_within_a_step_when_the_client_leaves(
    port: int, busy_host: Host, endless: type[EndlessEngine], path: str, stream: bool, phase: str
) -> None:
    client = post(port, ask(f"{phase} for ever", stream), path)
    assert (endless.talking if phase == "talk" else endless.reading).wait(WAIT_S)
    client.close()
    eventually(lambda: not busy_host.busy)
    assert endless.late_steps <= 1


@pytest.mark.parametrize("path", FORMS)
def test_a_stream_tells_how_far_the_prompt_is_read(port: int, busy_host: Host, path: str) -> None:
    with httpx.stream(
        "POST", f"http://127.0.0.1:{port}{path}", json=ask("read for ever", True), timeout=WAIT_S
    ) as answer:
        told = (line for line in answer.iter_lines() if line.startswith(": read "))
        first, second = (int(next(told).split()[2]) for _ in range(2))
        assert 0 <= first < second
    eventually(lambda: not busy_host.busy)


def test_a_message_says_how_long_its_prompt_is_while_it_is_read(port: int, busy_host: Host) -> None:
    url = f"http://127.0.0.1:{port}/v1/messages"
    with httpx.stream("POST", url, json=ask("read for ever", True), timeout=WAIT_S) as answer:
        begun = next(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        assert (begun["type"], begun["message"]["usage"]["input_tokens"]) == ("message_start", ENDLESS)
    eventually(lambda: not busy_host.busy)


def test_a_silent_stream_is_kept_alive(
    tmp_path: Path, gated_engine: type[GatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.01)
    host = open_host(tmp_path, gated_engine)
    with serving(build_app(host)) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=ask("hello", True), timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith(": keep-alive"))
            gated_engine.gate.release(100)
            rest = [line for line in lines if line and not line.startswith(":")]
        assert rest[-1] == "data: [DONE]"
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in rest[:-1]]
        assert "".join(one.get("content", "") for one in deltas).startswith("the cache keeps")
    host.close()


@pytest.fixture
def gated_engine() -> type[GatedEngine]:
    import threading

    return type("Gated", (GatedEngine,), {"gate": threading.Semaphore(0)})
