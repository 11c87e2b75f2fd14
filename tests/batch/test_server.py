"""A batch through a real server of the OpenAI API that misbehaves: overloaded, wrong, slow, gone, senseless."""

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
from app.services.batch.by_server import REFUSED, ByServer, Failing
from app.services.batch.endpoint import Server
from app.services.batch.run import Run
from tests.batch.conftest import Serve
from tests.batch.misbehaving import Reply, good, wrong
from tests.batch.test_files import CHAT, ids, written


def answered(folder: Path, url: str, count: int = 8, at_once: int = 3, **more: Any) -> tuple[Run, list[float]]:
    """A run over prompts that waits no time between attempts; the waits that it would have made."""
    waits: list[float] = []
    run = Run(written(folder, *({"prompt": f"p{n}", "id": n} for n in range(count))), folder / "out", threading.Event())
    try:
        run.answer(ByServer(Server.checked(url, **more), at_once, waits.append))
    finally:
        run.close()
    return run, waits


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


def errors(folder: Path) -> dict[str, str]:
    """The errors in the file, by the ids of their prompts."""
    records = map(json.loads, (folder / "out").read_text("utf-8").splitlines())
    return {one["id"]: one["error"] for one in records if "error" in one}


def asks(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


@pytest.mark.parametrize(("at", "at_once"), [(0, 1), (7, 3)])
@pytest.mark.parametrize("how", [wrong(500), wrong(503), wrong(403), wrong(404), wrong(501), (0, {}, b"")])
def test_a_prompt_that_is_never_answered_gets_an_error_and_the_others_go_on(
    tmp_path: Path, serve: Serve, how: Reply, at: int, at_once: int
) -> None:
    server = serve(lambda number, body: how if asks(body) == f"p{at}" else good(body))
    run, _ = answered(tmp_path, server.url, retries=1, at_once=at_once)
    assert (run.progress.done, run.progress.errors, run.progress.tokens) == (8, 1, 21)
    assert sorted(ids(tmp_path / "out")) == [str(n) for n in range(8)]
    assert errors(tmp_path) == {str(at): "not now" if how[0] else errors(tmp_path)[str(at)]}


def test_several_prompts_in_a_row_that_are_never_answered_are_only_their_own_errors(
    tmp_path: Path, serve: Serve
) -> None:
    server = serve(lambda number, body: wrong(500) if int(asks(body)[1:]) < REFUSED - 1 else good(body))
    run, _ = answered(tmp_path, server.url, count=REFUSED, retries=0, at_once=1)
    assert (run.progress.done, run.progress.errors) == (REFUSED, REFUSED - 1)


def test_a_batch_of_one_prompt_that_always_gets_500_ends_with_its_error(tmp_path: Path, serve: Serve) -> None:
    run, waits = answered(tmp_path, serve(lambda number, body: wrong(500)).url, count=1, retries=2)
    assert (run.progress.errors, waits, errors(tmp_path)) == (1, [1.0, 2.0], {"0": "not now"})


@pytest.mark.parametrize("how", [(0, {}, b""), wrong(503), wrong(404), wrong(403)])
def test_a_server_that_answers_no_line_any_more_ends_the_run_and_the_next_goes_on(
    tmp_path: Path, serve: Serve, how: Reply
) -> None:
    count = 6 + 2 * REFUSED
    server = serve(lambda number, body: good(body) if number <= 4 else how)
    with pytest.raises(Failing, match=r"(does not answer|answers no line|refuses every line).*run the command again"):
        answered(tmp_path, server.url, count=count, retries=1, at_once=1)
    kept = ids(tmp_path / "out")
    assert len(kept) == 4 == len({*kept})
    assert len(server.asked) <= 4 + 2 * (REFUSED + 2), "most prompts are not sent in vain"
    run, _ = answered(tmp_path, serve(lambda number, body: good(body)).url, count=count)
    assert run.progress.before == 4 and sorted(ids(tmp_path / "out"), key=int) == [str(n) for n in range(count)]


@pytest.mark.parametrize(
    ("status", "count"), [(401, 1), (401, 8), (402, 8), (403, 1), (403, 8), (404, 1), (405, 8), (307, 8)]
)
def test_what_concerns_every_line_ends_the_run_without_a_record(
    tmp_path: Path, serve: Serve, status: int, count: int
) -> None:
    server = serve(lambda number, body: wrong(status))
    with pytest.raises(Failing, match=str(status)):
        answered(tmp_path, server.url, count=count)
    assert (tmp_path / "out").read_bytes() == b""
    run, _ = answered(tmp_path, serve(lambda number, body: good(body)).url, count=count)
    assert (run.progress.done, run.progress.errors) == (count, 0)


def test_a_key_that_is_withdrawn_ends_the_run_at_once(tmp_path: Path, serve: Serve) -> None:
    server = serve(lambda number, body: good(body) if number <= 4 else wrong(401, "no such key"))
    with pytest.raises(Failing, match=r"does not accept the key \(401: no such key\).*--api-key"):
        answered(tmp_path, server.url, at_once=1, key="k")
    assert len(ids(tmp_path / "out")) == 4 and len(server.asked) == 5


def test_a_line_that_is_wrong_says_nothing_of_the_others(tmp_path: Path, serve: Serve) -> None:
    """A 400 does not show that a server knows the model."""
    server = serve(lambda number, body: wrong(400) if asks(body) == "p3" else wrong(404, "no such model"))
    with pytest.raises(Failing, match=r"refuses every line \(404: no such model\).*--model"):
        answered(tmp_path, server.url, at_once=1)
    assert errors(tmp_path) == {"3": "not now"}


@pytest.mark.parametrize(
    ("said", "waited"),
    [
        ("0", 0.0),
        ("7", 7.0),
        ("999999", 60.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("soon", 1.0),
        ("-5", 1.0),
        ("1e9999", 1.0),
        ("9" * 400, 60.0),
        ("Mon, 01 Jan 0001 00:00:00 GMT", 0.0),
        ("", 1.0),
    ],
)
def test_waits_are_bounded_whatever_the_server_asks_for(tmp_path: Path, serve: Serve, said: str, waited: float) -> None:
    server = serve(lambda number, body: wrong(429, **{"retry-after": said}) if number == 1 else good(body))
    _, waits = answered(tmp_path, server.url, count=1)
    assert waits == [waited]


def test_no_server_at_all(tmp_path: Path) -> None:
    with pytest.raises(Failing, match="does not answer"):
        answered(tmp_path, "http://127.0.0.1:9", retries=1)
    assert (tmp_path / "out").read_bytes() == b""


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
