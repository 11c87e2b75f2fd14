"""A server that is stopped ends its open answers with an error, in the form of the API that they were asked through."""

from __future__ import annotations

import asyncio
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

from app.client.process import Server as Process
from app.server.api import build_app
from app.ui.serve import Server
from tests.api.conftest import events
from tests.app.conftest import WAIT_S, open_host
from tests.app.served import EndlessEngine, eventually, post

Stoppable = tuple[int, type[EndlessEngine], Callable[[], None]]
hanging = threading.Event()


def asked(path: str, stream: bool = True, text: str = "talk for ever") -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": text}]}
    return {
        **({"/v1/responses": {"input": text}, "/v1/completions": {"prompt": text}}.get(path, messages)),
        "stream": stream,
    }


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_ends_with_an_error_event(stoppable: Stoppable, path: str, caplog: pytest.LogCaptureFixture) -> None:
    port, engine, stop = stoppable
    url = f"http://127.0.0.1:{port}{path}"
    with httpx.stream("POST", url, json=asked(path), timeout=WAIT_S) as answer:
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
    clients = [post(port, asked(path, stream), path) for stream in (False, False, True)]
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


def test_a_request_that_does_not_end_is_cut_off_without_a_traceback(
    stoppable: Stoppable, caplog: pytest.LogCaptureFixture
) -> None:
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
        body = asked(path, text="What does heapq do? " * 120) | {"max_tokens": 400}
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
