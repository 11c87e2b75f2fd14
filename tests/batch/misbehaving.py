"""A server of the OpenAI API that answers as a script says, and notes what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]  # status (0: hang up), headers, body
Script = Callable[[int, dict[str, Any]], Reply]


class Misbehaving(ThreadingHTTPServer):
    """Calls `script(number of the request, its body)` for each request."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self._lock, self._script = threading.Lock(), script
        super().__init__(("127.0.0.1", 0), Handler)

    def reply(self, path: str, key: str | None, body: dict[str, Any]) -> Reply:
        with self._lock:
            self.asked.append((path, key, body))
            number = len(self.asked)
        return self._script(number, body)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Misbehaving)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(*server.reply(self.path, self.headers.get("authorization"), body))

    def do_GET(self) -> None:
        """What a redirected POST becomes."""
        server = self.server
        assert isinstance(server, Misbehaving)
        self.answer(*server.reply(self.path, self.headers.get("authorization"), {}))

    def answer(self, status: int, headers: dict[str, str], said: bytes) -> None:
        if status == 0:
            self.close_connection = True
            return
        self.send_response(status)
        self.close_connection = "content-length" in headers  # which is wrong
        lengths = {} if self.close_connection else {"content-length": str(len(said))}
        for name, value in {**headers, **lengths}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(said)
        except OSError:
            self.close_connection = True  # a client that has seen enough

    def log_message(self, format: str, *args: Any) -> None:
        pass


def good(body: dict[str, Any]) -> Reply:
    text = f"to {body['messages'][-1]['content']}"
    found = {"id": "r", "choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}}
    return 200, {}, json.dumps(found).encode()


def wrong(status: int, message: str = "not now", **headers: str) -> Reply:
    return status, headers, json.dumps({"error": {"message": message, "type": "server_error"}}).encode()


@contextmanager
def serving(script: Script) -> Iterator[Misbehaving]:
    server = Misbehaving(script)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
