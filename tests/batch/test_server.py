"""A batch through a real server of the OpenAI API that misbehaves: overloaded, wrong, slow to come back, gone."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from app.services.batch.by_server import REFUSED, ByServer, Failing
from app.services.batch.endpoint import Server
from app.services.batch.run import Run
from tests.batch.conftest import Serve
from tests.batch.misbehaving import Reply, good, wrong
from tests.batch.test_files import ids, written


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
