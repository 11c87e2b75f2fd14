"""What nobody foresaw is in the log by its kind and place; what was said is nowhere in it."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app import cli
from app.server.api import build_app
from app.services.chats import Chats
from app.services.crash import describe
from app.services.host import Host
from app.ui.serve import build
from core.errors import MoestroError
from core.types import Piece
from tests.app.conftest import QuickEngine, ended, open_host
from tests.app.served import ask
from tests.logged import Logged

CANARY = "canary-7Q4-my-secret"
HOME = "http://127.0.0.1:7860"


class Quoting(QuickEngine):
    """Fails with an error that quotes what it was asked, as a tokenizer's or a template's may."""

    kind: type[Exception] = ValueError

    def generate(self, messages: Sequence[Mapping[str, str]] | str, *_: Any, **how: Any) -> Iterator[Piece]:
        try:
            raise KeyError(str(messages))
        except KeyError as error:
            raise self.kind(f"could not read {messages!r}") from error


@pytest.fixture
def quoting(tmp_path: Path) -> Host:
    return open_host(tmp_path, Quoting)


def nowhere(text: str, caplog: Logged, capfd: pytest.CaptureFixture[str], folder: Path) -> str:
    """What was logged; the text is in no record, with or without its traceback, in no output, and in no log file."""
    for record in caplog.records:
        told = [record.getMessage(), record.exc_text or "", repr(record.args)]
        if record.exc_info:
            told.append(logging.Formatter().formatException(record.exc_info))
        assert text not in "".join(told)
    assert text not in caplog.text
    printed = capfd.readouterr()
    assert text not in printed.out + printed.err
    for path in folder.rglob("*.log*"):
        assert text not in path.read_text(encoding="utf-8")
    return caplog.text


@pytest.mark.parametrize("kind", [ValueError, MoestroError, RuntimeError])
@pytest.mark.parametrize("way", ["chat", "whole", "stream"])
def test_an_answer_that_fails_leaves_no_words_in_the_log(
    quoting: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Logged,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    way: str,
    kind: type[Exception],
) -> None:
    monkeypatch.setattr(Quoting, "kind", kind)
    with caplog.at_level(logging.DEBUG):
        if way == "chat":
            assert ended(quoting.chats.ask(None, CANARY)).error
        else:
            with TestClient(build_app(quoting), base_url=HOME) as client:
                assert "error" in client.post("/v1/chat/completions", json=ask(CANARY, stream=way == "stream")).text
    told = nowhere(CANARY, caplog, capfd, tmp_path)
    assert kind is MoestroError or ("ValueError" in told or "RuntimeError" in told) and "test_crash.py" in told


def test_routes_log_no_words(quoting: Host, caplog: Logged, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def ui(app: FastAPI) -> None:
        @app.post("/v1x/fail")
        def fail(body: dict[str, Any]) -> None:
            raise RuntimeError(str(body))

    quoting.chats.complete = lambda *_: (_ for _ in ()).throw(TypeError(f"complete of {CANARY}"))  # type: ignore[method-assign]
    with TestClient(build_app(quoting, ui), base_url=HOME) as client:
        for path, body in (
            ("/v1x/fail", {"x": CANARY}),
            ("/v1/chat/completions", ask(CANARY)),
            ("/v1/chat/completions", {"messages": CANARY}),
        ):
            answer = client.post(path, json=body)
            assert answer.json()["error"]["type"] == (
                "invalid_request_error" if path.endswith("s") and "content" not in str(body) else "server_error"
            )
            assert CANARY not in answer.text
    told = nowhere(CANARY, caplog, capfd, tmp_path)
    assert "unexpected error in POST /v1x/fail" in told
    assert "builtins.TypeError" in told


def test_an_event_of_the_page_that_fails_tells_the_page_and_leaves_no_words_in_the_log(
    tmp_path: Path, caplog: Logged, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chats, "ask", lambda self, chat, text, system: {}[text])
    host = open_host(tmp_path)
    with TestClient(build(host), base_url=HOME, raise_server_exceptions=False) as client:
        config = client.get("/config").json()
        box = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == "message")
        send = next(one for one in config["dependencies"] if [box, "submit"] in one["targets"])
        reply = client.post(
            "/gradio_api/run/predict",
            json={
                "data": [CANARY, {"open": True, "chat": None, "stamp": "", "turn": "", "sent": False}, ""],
                "fn_index": send["id"],
                "session_hash": "me",
            },
        )
    host.close()
    assert reply.status_code == 200
    assert "error inside Moestro" in reply.text
    assert "builtins.KeyError" in nowhere(CANARY, caplog, capfd, tmp_path)


@pytest.mark.parametrize("words", [["--prompt", CANARY], [f"--prompt={CANARY}\nand more {CANARY}"]])
def test_the_command_line_logs_no_prompt(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["launch.py", "chat", *words, "--model", "demo"])

    def fail(args: Any) -> int:
        raise ValueError(f"could not answer {args.prompt!r}")

    monkeypatch.setattr(cli.MODULES["chat"], "run", fail)
    assert cli.main(sys.argv[1:]) == 1
    log = (tmp_path / "moestro.log").read_text(encoding="utf-8")
    assert CANARY not in log
    assert "--model demo" in log
    assert "ValueError" in log


def test_what_sees_numbers_alone_may_say_them() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
    assert "left out" in describe(raised.value), "it was this file that asked"
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(3, 5)(torch.ones(2, 4))
    assert "shapes cannot be multiplied" in describe(raised.value)
    with pytest.raises(FileNotFoundError) as missing:
        Path(f"/{CANARY}").read_text()
    told = describe(missing.value)
    assert "No such file" in told and CANARY not in told.split("\n")[-1]


def test_a_folder_that_is_named_torch_is_not_torch(tmp_path: Path) -> None:
    file = tmp_path / "torch" / "moestro" / "chats.py"
    with pytest.raises(ValueError, match=CANARY) as raised:
        exec(compile(f"raise ValueError({CANARY!r})", file, "exec"))
    assert CANARY not in describe(raised.value)


def test_causes_and_groups_are_told_without_their_words() -> None:
    def fail() -> None:
        try:
            raise KeyError(CANARY)
        except KeyError:
            raise ExceptionGroup(CANARY, [ValueError(CANARY)])  # noqa: B904

    with pytest.raises(ExceptionGroup) as raised:
        fail()
    told = describe(raised.value)
    assert CANARY not in told
    for name in ("KeyError", "ExceptionGroup", "ValueError", "While that was handled"):
        assert name in told
