"""Nothing leaves the machine: not while the page is built and opened, not while a question is answered."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.ui.serve import build
from tests.app.conftest import open_host
from tests.security.conftest import HOME


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that something wanted to connect to or to look up; it is not let."""
    found: list[str] = []

    def refuse(what: Any) -> None:
        found.append(str(what))
        raise OSError("no connection in this test")

    monkeypatch.setattr(socket.socket, "connect", lambda self, address: refuse(address))
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: refuse(address))
    monkeypatch.setattr(socket.socket, "sendto", lambda self, *told: refuse(told[-1]))
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: (
            refuse(host) if host != "127.0.0.1" else [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]
        ),
    )
    return found


def test_the_page_and_a_chat_need_no_connection(tmp_path: Any, tried: list[str]) -> None:
    host = open_host(tmp_path)
    try:
        with TestClient(build(host), base_url=HOME) as client:
            for path in ("/", "/config", "/theme.css", "/live/state", "/live/frame", "/favicon.ico"):
                assert client.get(path).status_code == 200
            page = {"open": False, "chat": None, "stamp": "", "turn": "", "sent": False}
            events = {event["api_name"]: event for event in client.get("/config").json()["dependencies"]}
            for name, data in (("open_page", [page]), ("_send", ["hello", page, ""])):
                reply = client.post(
                    "/gradio_api/run/predict", json={"data": data, "fn_index": events[name]["id"], "session_hash": "me"}
                )
                assert reply.status_code == 200, reply.text
            asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
            assert client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    finally:
        host.close()
    assert tried == []
    with pytest.raises(OSError, match="no connection"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    assert tried == ["192.0.2.1"]
