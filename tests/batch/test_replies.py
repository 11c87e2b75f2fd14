"""Replies that make no sense: an error of their own line, with words for what is wrong, and the others go on."""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.services.batch import reply as replies
from app.services.batch.answers_file import AnswersFile
from tests.batch.conftest import Serve
from tests.batch.misbehaving import Reply, good
from tests.batch.test_files import CHAT, ids, written
from tests.batch.test_server import answered, asks, errors


def chat(**changes: Any) -> bytes:
    found = {"id": "r", "choices": [{"message": {"content": "yes"}}], "usage": {"completion_tokens": 3}, **changes}
    return json.dumps(found).encode()


MALFORMED = {
    "a list": (b"[]", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "a text": (b'"x"', "not a JSON object"),
    "a number": (b"3", "not a JSON object"),
    "true": (b"true", "not a JSON object"),
    "nothing in it": (b"{}", "choices"),
    "no body": (b"", "empty"),
    "white space": (b" \n", "empty"),
    "choices null": (chat(choices=None), "choices"),
    "no choice": (chat(choices=[]), "choices"),
    "a choice null": (chat(choices=[None]), "choices.0"),
    "an empty choice": (chat(choices=[{}]), "choices.0.message"),
    "choices by name": (chat(choices={"0": {}}), "choices"),
    "a list as choice": (chat(choices=[[]]), "choices.0"),
    "message null": (chat(choices=[{"message": None}]), "choices.0.message"),
    "a text as message": (chat(choices=[{"message": "yes"}]), "choices.0.message"),
    "an empty message": (chat(choices=[{"message": {}}]), "choices.0.message.content"),
    "a number as content": (chat(choices=[{"message": {"content": 3}}]), "content"),
    "a list as content": (chat(choices=[{"message": {"content": ["yes"]}}]), "content"),
    "a number as reason": (chat(choices=[{"message": {"content": "a"}, "finish_reason": 3}]), "finish_reason"),
    "an answer of completions": (chat(choices=[{"text": "yes"}]), "choices.0.message"),
    "a list as usage": (chat(usage=[]), "usage"),
    "a text as usage": (chat(usage="3"), "usage"),
    "tokens as text": (chat(usage={"completion_tokens": "3"}), "usage.completion_tokens"),
    "tokens as list": (chat(usage={"prompt_tokens": [3]}), "usage.prompt_tokens"),
    "tokens true": (chat(usage={"prompt_tokens": True}), "usage.prompt_tokens"),
    "not UTF-8": (b'{"a": "\xff"}', "UTF-8"),
    "half a character": (chat().replace(b"yes", b"\\ud800"), "surrogate"),
    "HTML": (b"<!DOCTYPE html><p>It works!", "not JSON"),
    "a part of JSON": (chat()[:-9], "not JSON"),
    "two of it": (chat() * 2, "not JSON"),
    "not a number": (chat(x=float("nan")), "NaN"),
    "no end of digits": (chat(x=0)[:-2] + b"9" * 5000 + b"}", "digits"),
    "no end of depth": (b"[" * 100_000 + b"]" * 100_000, "nested"),
    "an event stream": (b"data: " + chat() + b"\n\n", "not JSON"),
}


def test_each_is_an_error_of_its_line(tmp_path: Path, serve: Serve) -> None:
    """Every shape is one line of a batch whose other lines are answered."""
    shapes = [body for body, _ in MALFORMED.values()]

    def script(number: int, asked: dict[str, Any]) -> Reply:
        line = int(asks(asked)[1:])
        return good(asked) if line % 2 else (200, {}, shapes[line // 2])

    run, waits = answered(tmp_path, serve(script).url, count=2 * len(shapes))
    assert (run.progress.done, run.progress.errors, waits) == (2 * len(shapes), len(shapes), [])
    found = errors(tmp_path)
    assert found.keys() == {str(2 * n) for n in range(len(shapes))}
    for n, (kind, (_, said)) in enumerate(MALFORMED.items()):
        words = found[str(2 * n)]
        assert words.startswith("The server's reply is malformed: ") and said in words, (kind, words)


def test_of_openais_form_it_is_an_error_of_that_form(tmp_path: Path, serve: Serve) -> None:
    from app.services.batch.by_server import ByServer
    from app.services.batch.endpoint import Server
    from app.services.batch.run import Run

    lines = [
        {"custom_id": "chat", "body": CHAT},
        {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "once"}},
    ]
    server = serve(lambda number, body: (200, {}, chat(choices=[{}])))
    run = Run(written(tmp_path, *lines), tmp_path / "out", threading.Event())
    run.answer(ByServer(Server.checked(server.url), 1))
    run.close()
    records = [json.loads(line) for line in (tmp_path / "out").read_text("utf-8").splitlines()]
    assert {one["error"]["code"] for one in records} == {"malformed_reply"}
    assert {one["response"]["status_code"] for one in records} == {502}
    assert "choices.0.text" in records[1]["error"]["message"]
    AnswersFile(tmp_path / "out").close()


@pytest.mark.parametrize("status", [400, 500])
def test_errors_of_any_shape_are_errors_of_their_lines(tmp_path: Path, serve: Serve, status: int) -> None:
    objects = [b"[]", b"3", b'"x"', b"null", b'{"message": 3, "code": [1], "type": {}}', b'{"message": "\\ud800"}']
    shapes = [*(b'{"error": %b}' % one for one in objects), b"", b"[]", b"\xff\x1b[2J", b"x" * 200_000]
    count = len(shapes)
    server = serve(lambda number, asked: (status, {}, shapes[int(asks(asked)[1:])]))
    run, _ = answered(tmp_path, server.url, count=count, retries=0)
    assert run.progress.errors == count and sorted(ids(tmp_path / "out"), key=int) == [str(n) for n in range(count)]
    assert all(0 < len(said) <= replies.MOST_TEXT for said in errors(tmp_path).values())
    AnswersFile(tmp_path / "out").close()


def test_a_reply_without_end_is_left_at_a_limit(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST_BYTES", 1 << 20)
    server = serve(lambda number, asked: (200, {}, chat(x="a" * (2 << 20))) if number == 1 else good(asked))
    run, _ = answered(tmp_path, server.url, count=2, at_once=1)
    assert run.progress.errors == 1 and "larger than 1 MB" in errors(tmp_path)["0"]


def test_a_reply_that_was_compressed_unasked_is_not_unpacked(tmp_path: Path, serve: Serve) -> None:
    bomb = zlib.compress(chat(x="a" * (8 << 20)))
    server = serve(lambda number, asked: (200, {"content-encoding": "deflate"}, bomb))
    run, _ = answered(tmp_path, server.url, count=1)
    assert run.progress.errors == 1 and "compressed" in errors(tmp_path)["0"]


@pytest.mark.parametrize(("wrong_by", "said"), [(9, "cut off"), (-9, "not JSON")])
def test_a_reply_of_another_length_than_it_says(tmp_path: Path, serve: Serve, wrong_by: int, said: str) -> None:
    def script(number: int, asked: dict[str, Any]) -> Reply:
        if asks(asked) != "p1":
            return good(asked)
        return 200, {"content-length": str(len(chat()) + wrong_by)}, chat()

    run, waits = answered(tmp_path, serve(script).url, count=3, retries=1)
    assert (run.progress.done, run.progress.errors) == (3, 1) and said in errors(tmp_path)["1"]
    assert waits == ([1.0] if said == "cut off" else []), "what a connection lost is asked for again"


@pytest.fixture
def dripping() -> Iterator[str]:
    """The address of a server that sends its answer a byte at a time, and never the last one."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                while not over.wait(0.02):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()


def test_an_answer_that_drips_has_no_longer_than_the_others(tmp_path: Path, dripping: str) -> None:
    began_s = time.monotonic()
    run, _ = answered(tmp_path, dripping, count=1, retries=0, timeout_s=0.3)
    assert run.progress.errors == 1 and "longer than 0.3 s" in errors(tmp_path)["0"]
    assert time.monotonic() - began_s < 30
