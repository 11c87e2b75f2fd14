"""Streams, and who stops them: a client that leaves, a server that ends."""

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from app.server.api import build_app
from app.server.v1 import reply
from app.services.host import Host
from app.ui.serve import Server
from tests.api.conftest import events
from tests.app.conftest import WAIT_S, GatedEngine, open_host
from tests.app.served import ENDLESS, EndlessEngine, eventually, post, serving
from tests.client.process import Server as Process
from tests.logged import Logged
from tests.selection import layered

FORMS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def ask(text: str, stream: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "input": text, "stream": stream}


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


def test_silence_is_filled(tmp_path: Path, gated: type[GatedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.01)
    host = open_host(tmp_path, gated)
    with serving(build_app(host)) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=ask("hello", True), timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith(": keep-alive"))
            gated.gate.release(100)
            rest = [line for line in lines if line and not line.startswith(":")]
        assert rest[-1] == "data: [DONE]"
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in rest[:-1]]
        assert "".join(one.get("content", "") for one in deltas).startswith("the cache keeps")
    host.close()


Stoppable = tuple[int, type[EndlessEngine], Callable[[], None]]
hanging = threading.Event()


def is_error(path: str, found: list[tuple[str, Any]]) -> bool:
    """Whether a stream ended with an error event of its API, and with nothing that says that it was complete."""
    name, last = next(event for event in reversed(found) if event[1] != "[DONE]")
    if path == "/v1/messages":
        return name == "error" and last["type"] == "error" and "stopped" in last["error"]["message"]
    if path == "/v1/responses":
        return name == "error" and "stopped" in last["message"]
    return "stopped" in last["error"]["message"] and last["error"]["type"] == "server_error"


async def hang() -> None:
    hanging.set()
    await asyncio.Event().wait()


@pytest.fixture
def stoppable(tmp_path: Path) -> Iterator[Stoppable]:
    """(port, engine, what stops the server and waits for its end)."""
    engine = EndlessEngine.fresh()
    host = open_host(tmp_path, engine)
    app = build_app(host, lambda app: app.add_api_route("/hang", hang))
    server = Server(host, uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)

    def stop() -> None:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()

    yield server.servers[0].sockets[0].getsockname()[1], engine, stop
    stop()
    host.close()


@pytest.mark.parametrize("path", FORMS)
def test_a_stream_ends_with_an_error_event(stoppable: Stoppable, path: str, caplog: Logged) -> None:
    port, engine, stop = stoppable
    url = f"http://127.0.0.1:{port}{path}"
    with httpx.stream("POST", url, json=ask("talk for ever", True), timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        assert engine.talking.wait(WAIT_S)
        stopping = threading.Thread(target=stop)
        stopping.start()
        assert is_error(path, events("\n".join(lines)))
        stopping.join()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_answers_that_wait_and_whole_ones_get_an_error_too(stoppable: Stoppable) -> None:
    """So does one that had not begun to wait."""
    port, engine, stop = stoppable
    path = "/v1/chat/completions"
    clients = [post(port, ask("talk for ever", stream), path) for stream in (False, False, True)]
    assert engine.talking.wait(WAIT_S)
    stop()
    for client, status in zip(clients, (503, 503, 200), strict=True):
        reply = b""
        while more := client.recv(1 << 16):
            reply += more
        late = b"Moestro is closing" in reply
        assert reply.startswith(f"HTTP/1.1 {503 if late else status}".encode()) and b'"error"' in reply
        assert b"was stopped before" in reply or late
        client.close()


def test_a_request_that_does_not_end_is_cut_off_without_a_traceback(stoppable: Stoppable, caplog: Logged) -> None:
    port, _, stop = stoppable
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    client.sendall(f"GET /hang HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
    assert hanging.wait(WAIT_S)
    stop()
    client.close()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.long(minutes=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
def test_the_real_server_ends_its_stream_and_itself(tmp_path: Path, name: str, path: str) -> None:
    server = Process(tmp_path / "home")
    with ExitStack() as ends:
        ends.enter_context(server)
        body = ask("What does heapq do? " * 120, True) | {"max_tokens": 400}
        answer = ends.enter_context(httpx.stream("POST", f"{server.url}{path}", json=body, timeout=WAIT_S))
        lines = answer.iter_lines()
        first = next(lines)
        server.process.send_signal(getattr(signal, name))
        began_s = time.monotonic()
        assert is_error(path, events("\n".join([first, *lines])))
        assert server.process.wait(60) == 0
        took_s = time.monotonic() - began_s
    log = server.log.read_text()
    assert "Traceback" not in log and "Cancel" not in log, log
    print(f"ended {took_s:.1f} s after {name}")
