"""A real server on loopback, clients that leave when a test wants, and an engine that goes on until it is stopped."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from core.types import Piece
from tests.app.conftest import WAIT_S, QuickEngine

ENDLESS = 10**6


class EndlessEngine(QuickEngine):
    """Reads its prompt for ever when that says so, else talks for ever. Tells what it does, and counts the steps that
    it makes after it was told to stop."""

    reading: threading.Event
    talking: threading.Event
    late_steps: int

    @classmethod
    def fresh(cls) -> "type[EndlessEngine]":
        return type("Endless", (cls,), {"reading": threading.Event(), "talking": threading.Event(), "late_steps": 0})

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        assert cancel is not None and not isinstance(messages, str)
        kind, reads = type(self), "read for ever" in messages[-1]["content"]
        for number in range(ENDLESS):
            if cancel.wait(0.001):
                return
            (kind.reading if reads else kind.talking).set()
            kind.late_steps += cancel.is_set()
            yield Piece("prefill", done=number, total=ENDLESS) if reads else Piece("token", text="on ", token=number)


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive()


def post(port: int, body: Mapping[str, Any] | bytes, path: str = "/v1/chat/completions") -> socket.socket:
    """A connection over which this was asked; its answer has not been read yet."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    client.sendall(
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return client


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def eventually(true: Callable[[], bool]) -> None:
    """Wait until something is true that tells nobody when it becomes so."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
