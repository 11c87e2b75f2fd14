"""A model whose chat template never ends, once a message says so, in a real server: nobody else notices, and the server
ends when it is told to."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from core.engine.prompt import QUICK_CHARS
from tests.client.process import ROOT, Server

pytestmark = pytest.mark.long(0.5)
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
