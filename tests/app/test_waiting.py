"""Clients that leave, and queues that grow: a real server, and an engine that never ends by itself."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import httpx
import pytest
from fastapi import FastAPI

from app.server.api import build_app
from app.services.answer_queue import MOST_WAITING, QueueFullError, Turns, span
from app.services.host import Host
from tests.app.conftest import WAIT_S, open_host
from tests.app.served import EndlessEngine, ask, eventually, post, serving


@pytest.fixture
def endless() -> type[EndlessEngine]:
    return EndlessEngine.fresh()


@pytest.fixture
def busy_host(tmp_path: Path, endless: type[EndlessEngine]) -> Host:
    return open_host(tmp_path, endless)


@pytest.fixture
def port(busy_host: Host) -> Iterator[int]:
    def pool(app: FastAPI) -> None:
        @app.get("/threads-in-use")
        async def in_use() -> float:
            return anyio.to_thread.current_default_thread_limiter().statistics().borrowed_tokens

    with serving(build_app(busy_host, pool)) as port:
        yield port


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["talk", "read"])
def test_an_answer_ends_within_a_step_when_its_client_leaves(
    port: int, busy_host: Host, endless: type[EndlessEngine], stream: bool, phase: str
) -> None:
    client = post(port, ask(f"{phase} for ever", stream=stream))
    assert (endless.talking if phase == "talk" else endless.reading).wait(WAIT_S)
    client.close()
    eventually(lambda: not busy_host.busy)
    assert endless.late_steps <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_queue_drops_who_leaves(port: int, busy_host: Host, endless: type[EndlessEngine], stream: bool) -> None:
    first = busy_host.chats.complete([{"role": "user", "content": "talk for ever"}], busy_host.chats.sampling)
    assert endless.talking.wait(WAIT_S)
    client = post(port, ask("read for ever", stream=stream))
    eventually(lambda: busy_host.chats.waiting == 1)
    client.close()
    eventually(lambda: busy_host.chats.waiting == 0)
    assert not first.finished
    busy_host.chats.stop_answer(first)
    assert first.join(WAIT_S)
    eventually(lambda: not busy_host.busy)
    assert not endless.reading.is_set(), "it was written for nobody"


def test_a_full_queue_holds_no_thread_and_refuses_the_next(port: int, busy_host: Host) -> None:
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as clients:
        clients.enter_context(post(port, ask("talk for ever")))
        eventually(lambda: busy_host.busy and busy_host.chats.waiting == 0)
        for number in range(MOST_WAITING):
            clients.enter_context(post(port, ask("talk for ever", stream=bool(number % 2))))
        eventually(lambda: busy_host.chats.waiting == MOST_WAITING)
        eventually(lambda: httpx.get(f"{url}/threads-in-use", timeout=WAIT_S).json() == 0)
        assert httpx.get(f"{url}/healthz", timeout=WAIT_S).json()["waiting"] == MOST_WAITING
        assert httpx.get(f"{url}/live/frame", timeout=WAIT_S).status_code == 200, "a route that needs a thread has one"
        refused = httpx.post(f"{url}/v1/chat/completions", json=ask("one more"), timeout=WAIT_S)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "queue_full")
        assert f"{MOST_WAITING} answers are waiting" in error["message"]
        with pytest.raises(QueueFullError):
            busy_host.chats.ask(None, "the dashboard's own wait in the same queue")
        assert busy_host.store.chats.all() == [], "a refused message left a chat behind"
    eventually(lambda: not busy_host.busy)


def test_the_expected_wait_is_that_of_answers_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("app.services.answer_queue.time.monotonic", lambda: now[0])
    turns = Turns()
    turns.require_place(MOST_WAITING - 1)
    with pytest.raises(QueueFullError, match="not known yet"):
        turns.require_place(MOST_WAITING)
    for took_s in (20, 40):
        turns.begin()
        now[0] += took_s
        turns.end()
    turns.begin()
    now[0] += 10
    with pytest.raises(QueueFullError, match="free in about 20 s, and its answer begins about 100 min after") as caught:
        turns.require_place(MOST_WAITING)
    assert caught.value.retry_s == 20
    now[0] += 1000
    with pytest.raises(QueueFullError) as caught:
        turns.require_place(MOST_WAITING)
    assert caught.value.retry_s == 1


@pytest.mark.parametrize(("seconds", "words"), [(0.0, "1 s"), (119, "119 s"), (600, "10 min"), (9000, "2 h")])
def test_waits_in_words(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_a_whole_answer_is_sent_by_a_real_server(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    with serving(build_app(host)) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        whole = httpx.post(url, json=ask("hello", max_tokens=2), timeout=WAIT_S).json()
        assert whole["choices"][0]["message"]["content"] == "the cache "
        streamed = httpx.post(url, json=ask("hello", max_tokens=2, stream=True), timeout=WAIT_S).text
        lines = [one for one in streamed.split("\n\n") if one.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        deltas = [json.loads(one.removeprefix("data: "))["choices"][0]["delta"] for one in lines[:-1]]
        assert "".join(one.get("content", "") for one in deltas) == "the cache "
