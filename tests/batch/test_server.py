"""A batch through a real server of the OpenAI API that misbehaves: overloaded, wrong, slow to come back, gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.batch.by_server import ByServer, Failing, Server
from app.batch.run import Run
from tests.batch.test_files import ids, written

Reply = tuple[int, dict[str, str], bytes]


class Misbehaving(ThreadingHTTPServer):
    """Answers as `script` says, and notes what it was asked."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Reply]) -> None:
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
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Misbehaving)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, headers, said = server.reply(self.path, self.headers.get("authorization"), body)
        if status == 0:  # hangs up
            self.connection.close()
            return
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(said))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def good(body: dict[str, Any]) -> Reply:
    text = f"to {body['messages'][-1]['content']}"
    found = {"id": "r", "choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}}
    return 200, {}, json.dumps(found).encode()


def wrong(status: int, **headers: str) -> Reply:
    return status, headers, json.dumps({"error": {"message": "not now", "type": "server_error"}}).encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[int, dict[str, Any]], Reply]], Misbehaving]]:
    servers: list[Misbehaving] = []

    def start(script: Callable[[int, dict[str, Any]], Reply]) -> Misbehaving:
        server = Misbehaving(script)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answered(folder: Path, url: str, count: int = 8, at_once: int = 3, **more: Any) -> tuple[Run, list[float]]:
    """A run over prompts that waits no time between attempts; the waits that it would have made."""
    waits: list[float] = []
    run = Run(written(folder, *({"prompt": f"p{n}", "id": n} for n in range(count))), folder / "out", threading.Event())
    try:
        run.answer(ByServer(Server(url, **more), at_once, waits.append))
    finally:
        run.close()
    return run, waits


Serve = Callable[[Callable[[int, dict[str, Any]], Reply]], Misbehaving]


def test_prompts_are_sent_and_answers_written(tmp_path: Path, serve: Serve) -> None:
    server = serve(lambda number, body: good(body))
    run, waits = answered(tmp_path, server.url, key="secret", model="m")
    assert (run.progress.done, run.progress.errors, run.progress.tokens, waits) == (8, 0, 24, [])
    records = {r["id"]: r["text"] for r in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert records == {str(n): f"to p{n}" for n in range(8)}
    assert {(path, key, body["model"]) for path, key, body in server.asked} == {
        ("/v1/chat/completions", "Bearer secret", "m")
    }


def test_an_overloaded_server_is_asked_again_when_it_says(tmp_path: Path, serve: Serve) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return wrong(429, **{"retry-after": "7"}) if number == 1 else wrong(503) if number in (3, 4) else good(body)

    run, waits = answered(tmp_path, serve(script).url, at_once=1)
    assert run.progress.done == 8 and not run.progress.errors
    assert waits == [7.0, 1.0, 2.0], "as it said; then longer each time"


def test_a_refused_line_is_an_error_and_the_rest_goes_on(tmp_path: Path, serve: Serve) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return wrong(400) if body["messages"][-1]["content"] == "p2" else good(body)

    run, waits = answered(tmp_path, serve(script).url)
    assert (run.progress.done, run.progress.errors, waits) == (8, 1, [])
    errors = [r for r in map(json.loads, (tmp_path / "out").read_text().splitlines()) if r.get("error")]
    assert errors == [{"id": "2", "error": "not now"}]


@pytest.mark.parametrize("how", [lambda body: wrong(500), lambda body: (0, {}, b""), lambda body: (200, {}, b"{")])
def test_a_server_that_fails_half_way_ends_the_run_and_the_next_goes_on(
    tmp_path: Path, serve: Serve, how: Callable[[dict[str, Any]], Reply]
) -> None:
    server = serve(lambda number, body: good(body) if number <= 4 else how(body))
    with pytest.raises(Failing, match=r"does not answer.*run the command again"):
        answered(tmp_path, server.url, retries=2, at_once=2)
    kept = ids(tmp_path / "out")
    assert len(kept) == 4 == len({*kept})
    run, _ = answered(tmp_path, serve(lambda number, body: good(body)).url)
    assert run.progress.before == 4 and sorted(ids(tmp_path / "out")) == [str(n) for n in range(8)]


def test_no_server_at_all(tmp_path: Path) -> None:
    with pytest.raises(Failing, match="does not answer"):
        answered(tmp_path, "http://127.0.0.1:9", retries=1)
    assert (tmp_path / "out").read_bytes() == b""
