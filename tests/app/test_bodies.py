"""What a request may send: sizes, depth, numbers and characters, at the door and in the store."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from app.server import bodies
from app.server.api import build_app
from app.server.bodies import KB, MB
from app.server.json_values import MOST_DEPTH, wrong_with
from app.services.host import Host
from app.store import StoreError
from core.errors import MoestroError
from tests.app.conftest import WAIT_S, open_host
from tests.app.served import EndlessEngine, ask, eventually, post, serving

HOME = "http://127.0.0.1:7860"
COMPLETE = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = open_host(tmp_path_factory.mktemp("home"))
    yield host
    host.close()


def uploading(app: FastAPI) -> None:
    @app.post("/gradio_api/upload")
    async def upload(request: Request) -> int:
        return sum([len(part) async for part in request.stream()])


@pytest.fixture(scope="module")
def client(host: Host) -> Iterator[TestClient]:
    with TestClient(build_app(host, uploading), base_url=HOME, raise_server_exceptions=False) as client:
        yield client


def chunks(size: int) -> Iterator[bytes]:
    for start in range(0, size, MB):
        yield b"x" * min(MB, size - start)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_BYTES", 2 * MB)
    monkeypatch.setattr(bodies, "MOST_UPLOADED", 3 * MB)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("path", [COMPLETE, "/gradio_api/run/predict"])
@pytest.mark.parametrize("content", [lambda size: b"x" * size, chunks], ids=["length", "chunked"])
def test_a_body_beyond_the_limit_is_refused(client: TestClient, path: str, content: Any) -> None:
    most = 2
    answer = client.post(path, content=content(most * MB + 1), headers=JSON)
    assert answer.status_code == 413
    told = f"The request is larger than {most} MB, and no more is read. Send less."
    form = {"message": told, "type": "invalid_request_error", "param": None, "code": "too_large"}
    assert answer.json()["error"] == (form if path == COMPLETE else told), "Gradio's page shows plain text"
    assert client.post(path, content=content(most * MB), headers=JSON).status_code in (400, 404)


@pytest.mark.usefixtures("small")
def test_an_upload_may_be_larger_but_not_without_end(client: TestClient) -> None:
    assert client.post("/gradio_api/upload", content=b"x" * (2 * MB + 1)).json() == 2 * MB + 1
    assert client.post("/gradio_api/upload", content=b"x" * (3 * MB + 1)).status_code == 413
    assert client.post("/gradio_api/upload", content=chunks(5)).status_code == 411, "its size has to be declared"
    claimed = {"content-length": "5", "transfer-encoding": "chunked"}
    assert client.post("/gradio_api/upload", content=chunks(5), headers=claimed).status_code == 411


@pytest.mark.long(0.1)
def test_a_sender_of_40_mb_hears_why_it_was_refused(host: Host) -> None:
    """Over a real connection, where closing it too early would lose the answer."""
    with serving(build_app(host)) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}{COMPLETE}", content=b"x" * 40 * MB, headers=JSON, timeout=WAIT_S)
        assert answer.status_code == 413
        with post(port, b"") as client:  # a client that goes in the middle of its body
            client.sendall(f"POST {COMPLETE} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\nx".encode())
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=WAIT_S).status_code == 200


def begun(port: int, sent: int, declared: int, path: str = COMPLETE) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {declared}"
    client.sendall(head.encode() + b"\r\n\r\n" + b" " * sent)
    return client


@pytest.mark.parametrize("path", [COMPLETE, "/v1/messages", "/gradio_api/upload"])
def test_a_body_that_stalls_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(bodies, "PIECE_S", 0.1)
    with serving(build_app(host, uploading)) as port, begun(port, 10, 20, path) as client:
        reply = HTTPResponse(client)
        reply.begin()
        assert (reply.status, reply.getheader("connection")) == (408, "close")
        assert "The body arrives too slowly" in reply.read().decode()


def test_slow_bodies_take_no_more_than_they_may_and_small_ones_pass(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MOST_TOGETHER", 300 * KB)
    large = b" " * 300 * KB + json.dumps(ask("hello", max_tokens=1)).encode()
    with serving(build_app(host)) as port:
        url = f"http://127.0.0.1:{port}"

        def sent(body: bytes, path: str = COMPLETE) -> httpx.Response:
            return httpx.post(url + path, content=body, headers=JSON, timeout=WAIT_S)

        assert sent(large).status_code == 200
        slow = [begun(port, 160 * KB, 200 * KB) for _ in range(12)]
        eventually(lambda: sent(large).status_code == 503)
        answer = sent(large, "/v1/messages")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, str(bodies.RETRY_S))
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert sent(json.dumps(ask("hello", max_tokens=1)).encode()).status_code == 200
        assert httpx.get(f"{url}/healthz", timeout=WAIT_S).status_code == 200
        for client in slow:
            client.close()
        eventually(lambda: sent(large).status_code == 200)


def test_a_body_is_counted_until_its_answer_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_TOGETHER", 300 * KB)
    host = open_host(tmp_path, EndlessEngine.fresh())
    large = b" " * 300 * KB + json.dumps(ask("hello", stream=True)).encode()
    try:
        with serving(build_app(host)) as port:
            with post(port, large) as client:
                assert client.recv(12) == b"HTTP/1.1 200"
                answer = httpx.post(f"http://127.0.0.1:{port}{COMPLETE}", content=large, headers=JSON, timeout=WAIT_S)
                assert answer.status_code == 503
            eventually(lambda: not host.busy)
            with post(port, large) as client:
                assert client.recv(12) == b"HTTP/1.1 200"
    finally:
        host.close()


def test_a_text_far_beyond_the_context_is_refused_before_it_is_read(client: TestClient, host: Host) -> None:
    before = host.store.chats.all()
    with pytest.raises(MoestroError, match="more characters than the context can hold"):
        host.chats.ask(None, "x" * 60_000)
    assert host.store.chats.all() == before
    error = client.post(COMPLETE, json=ask("x" * 60_000)).json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "messages",
        "context_length_exceeded",
    )


def nested(levels: int) -> bytes:
    return b'{"data": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (rb'{"x": "\ud800"}', "unpaired surrogate"),
        (rb'{"x": "\udc00\ud800"}', "unpaired surrogate"),
        (rb'{"\uDBFF": 1}', "unpaired surrogate"),
        (b'{"x": "\xed\xa0\x80"}', "unpaired surrogate"),
        ('{"x": "\ud800"}'.encode("utf-16", "surrogatepass"), "unpaired surrogate"),
        (rb'{"x": "\ud83d\ude00 \\ud800"}', ""),
        ('{"x": "😀"}'.encode(), ""),
        (b'{"x": 9223372036854775808}', "63 bits"),
        (b'{"x": -9223372036854775808}', "63 bits"),
        (b'{"x": [' + b"9" * 5000 + b"]}", "63 bits"),
        (b'{"x": 9223372036854775807}', ""),
        (b'{"x": "9223372036854775808 is too long for a number"}', ""),
        (b'{"x": 1e400}', ""),
        (nested(MOST_DEPTH), ""),
        (nested(MOST_DEPTH + 1), "inside one another"),
        (b"[" * 100_000, "inside one another"),
        (nested(100_000), "inside one another"),
        (b'{"x": [' + b"[]," * 5000 + b"[]]}", ""),
        (b"no JSON \x00", ""),
        (b"", ""),
    ],
)
def test_json_that_nothing_behind_could_take_is_refused(client: TestClient, body: bytes, wrong: str) -> None:
    assert (wrong in wrong_with(body)) if wrong else wrong_with(body) == ""
    answer = client.post("/gradio_api/run/predict", content=body, headers=JSON)
    assert answer.status_code == (400 if wrong else 404), "there is nothing behind this path here"
    assert wrong in answer.text


@pytest.mark.parametrize(
    "kind",
    ["Application/JSON", "application/vnd.api+JSON", "APPLICATION/json; charset=utf-16", "text/plain", "", "x", None],
)
@pytest.mark.parametrize("path", [COMPLETE, "/v1/messages", "/gradio_api/run/predict"])
def test_whatever_the_content_type_says_json_is_checked(client: TestClient, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post(path, content=nested(MOST_DEPTH + 1), headers=headers)
    assert answer.status_code == 400
    assert "inside one another" in answer.text


@pytest.mark.parametrize("number", [2**63, 10**30, -1])
@pytest.mark.parametrize(
    "url",
    (
        "/live/frame?layer={} /live/state?chat={} /live/state?answer={} /live/state?since={} /export/{}.zip "
        "/export/{}.trace /export/session.zip?load={} /export/session.trace?load={} /export/1.trace?load={}"
    ).split(),
)
def test_numbers_that_nothing_can_have_are_refused(host: Host, client: TestClient, url: str, number: int) -> None:
    answer = client.get(url.format(number))
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 2**63}, "63 bits"),
        ({"seed": -2}, "seed must lie between -1 and 9223372036854775807, not -2"),
        ({"temperature": 10**400}, "63 bits"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "unpaired surrogate"),
        ({"model": "\udfff"}, "unpaired surrogate"),
        ({"max_tokens": float("inf")}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_the_api_refuses_them_too(client: TestClient, change: dict[str, Any], told: str) -> None:
    answer = client.post(COMPLETE, content=json.dumps({**ask("hello"), **change}), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("chat", [10**30, int(1e30), 2**63])
def test_the_store_says_so_of_numbers_it_has_no_room_for(host: Host, chat: int) -> None:
    """As an event of the dashboard may name them, of which a floating point number looks harmless."""
    for asked in (
        lambda: host.chats.regenerate(chat),
        lambda: host.chats.messages(chat),
        lambda: host.chats.rename(chat, "x"),
        lambda: host.chats.delete(chat),
        lambda: host.chats.edit(chat, 1, "x"),
        lambda: host.chats.ask(chat, "x"),
    ):
        with pytest.raises(StoreError, match="no number so large"):
            asked()
    assert host.chats.answer(chat) is None


def test_the_store_and_the_chat_say_so_of_half_characters(host: Host) -> None:
    chat = host.chats.ask(None, "a whole one").chat_id
    assert chat is not None
    with pytest.raises(MoestroError, match="unpaired surrogate"):
        host.chats.ask(None, "\ud800")
    with pytest.raises(StoreError, match="unpaired surrogate"):
        host.chats.rename(chat, "\ud800")


@pytest.mark.parametrize("seed", [2**62 + 1, 2**63 - 1, "7", 7.0])
def test_a_seed_is_used_as_it_was_given(tmp_path: Path, host: Host, seed: Any) -> None:
    assert host.chats.set_sampling(seed=seed) == ""
    assert host.chats.sampling.seed == int(seed)
    host.chats.set_sampling(seed=-1)


@pytest.mark.parametrize("seed", [float("inf"), float("nan"), 10**400, "x" * 10_000, None, 2**63])
def test_what_is_no_seed_is_told_shortly(host: Host, seed: Any) -> None:
    assert 0 < len(host.chats.set_sampling(seed=seed)) < 200
