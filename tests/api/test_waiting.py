"""Queues that grow, and clients that leave them: a real server, and an engine that never ends by itself."""

from contextlib import ExitStack

import httpx
import pytest

from app.services.answer_queue import MOST_WAITING, QueueFullError, Turns, span
from app.services.host import Host
from tests.app.conftest import WAIT_S
from tests.app.served import EndlessEngine, ask, eventually, post


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
