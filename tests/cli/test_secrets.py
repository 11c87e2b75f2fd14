"""Secrets that are given to a command appear in no log and on no terminal, whatever fails while it runs."""

import argparse
import json
import os
import socket
import string
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app import cli
from app.cli import MODULES, build_parser, options
from app.services import secret as secrets
from app.services.batch import run as batch_run
from app.services.secret import HidingFormatter, hide, secret
from core.errors import MoestroError
from core.importing import parse as parse_hub
from tests.logged import Logged

ROOT = Path(__file__).resolve().parents[2]
LETTERS = st.text(string.ascii_letters + string.digits + "._~-", min_size=16, max_size=64).filter(
    lambda text: not text.startswith("-")
)
ANY = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=8, max_size=40).filter(
    lambda text: not text.startswith("-") and len(set(text)) > 4
)
HOW = ("plain", "repr", "header", "url", "ours", "group")
NEEDED = {"batch": ["--in", "IN", "--out", "OUT"]}


def declared(type: object) -> list[tuple[str, str]]:
    """(command, option) of every option that is declared with this type."""
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return [
        (name, action.option_strings[0])
        for name in MODULES
        for action in commands.choices[name]._actions
        if action.option_strings and action.type is type
    ]


def test_the_options_that_carry_secrets_are_declared() -> None:
    assert set(declared(secret)) >= {("ui", "--token"), ("chat", "--prompt")}
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name in MODULES:
        for action in commands.choices[name]._actions:
            words = set("-".join(action.option_strings).split("-")) & {"key", "password", "secret", "token"}
            assert not words or (name, action.option_strings[0]) in declared(secret), action.option_strings


def quoting(where: str, value: str) -> Callable[..., Any]:
    """Raises an error that quotes the value, in one of the ways in which libraries do."""

    def fail(*given: Any, **more: Any) -> Any:
        kinds: dict[str, Exception] = {
            "plain": ValueError(f"{value} was refused"),
            "repr": KeyError({"token": value}),
            "header": RuntimeError(json.dumps({"authorization": f"Bearer {value}"})),
            "url": OSError(5, f"no answer of http://me:{quote(value, safe='')}@host/?key={quote(value)}"),
            "ours": MoestroError(f"{value!r} cannot be used as a token"),
            "group": ExceptionGroup(value, [ValueError(value), KeyError(value)]),
        }
        try:
            raise kinds[where]
        except KeyError as error:
            raise TypeError(f"a cause, {value}") from error

    return fail


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(secrets, "_declared", set())
    (tmp_path / "IN").write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def unseen(value: str, home: Path, printed: Any) -> None:
    log = home / "moestro.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    for form in {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")}:
        assert form not in text
        assert form not in printed.err


@pytest.mark.long(0.1)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    option=st.sampled_from(declared(secret)),
    how=st.sampled_from(HOW),
    place=st.sampled_from(["run", "options", "inside"]),
    value=LETTERS | ANY,
    joined=st.booleans(),
)
@example(option=("ui", "--token"), how="plain", place="run", value="tok'en\"\\ü x", joined=True)
@example(option=("ui", "--token"), how="group", place="inside", value="tok'en\"\\ü x", joined=False)
def test_no_secret_reaches_the_log_or_the_terminal(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: tuple[str, str],
    how: str,
    place: str,
    value: str,
    joined: bool,
) -> None:
    command, name = option
    words = [f"{name}={value}"] if joined else [name, value]
    with monkeypatch.context() as patch:
        fail = quoting(how, value)
        if place == "run":
            patch.setattr(MODULES[command], "run", fail)
        elif place == "options":
            patch.setattr(options, "spec", fail)
        else:
            patch.setattr(batch_run, "Run", fail)
            patch.setattr("app.server.security.access.Access.chosen", fail)
            patch.setattr("app.cli.chat.load", fail)
        assert cli.main([command, *NEEDED.get(command, []), *words]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.err
    unseen(value, home, printed)


@pytest.mark.parametrize(
    ("command", "word"), [("ui", "--tok"), ("batch", "--key"), ("batch", "--Token"), ("ui", "--key")]
)
@pytest.mark.parametrize("joined", [False, True])
def test_misspelt_option(home: Path, capsys: pytest.CaptureFixture[str], command: str, word: str, joined: bool) -> None:
    value = "s3cret-value-of-mine"
    given = [f"{word}={value}"] if joined else [word, value]
    with pytest.raises(SystemExit):
        cli.main([command, *NEEDED.get(command, []), *given])
    printed = capsys.readouterr()
    assert word in printed.err
    unseen(value, home, printed)


@pytest.mark.parametrize("name", ["MOESTRO_TOKEN", "HF_TOKEN"])
def test_secrets_of_the_environment_are_hidden_too(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    value = "an-environment-secret"
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("app.cli.ui.choose_port", quoting("plain", value))
    assert cli.main(["ui"]) == 1
    printed = capsys.readouterr()
    assert "Unexpected error" in printed.err
    unseen(value, home, printed)


def test_credentials_in_addresses_are_hidden() -> None:
    assert hide("see https://user:word@other.example/x") == "see https://[hidden]@other.example/x"
    with pytest.raises(MoestroError, match=r"other\.example' is not") as refused:
        parse_hub("https://user:word@other.example/org/name")
    assert "word" not in str(refused.value)


def test_a_thread_that_ends_with_an_error_hides_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Logged
) -> None:
    value = "a-secret-of-a-thread"

    def run(args: argparse.Namespace) -> int:
        thread = threading.Thread(target=quoting("plain", value))
        thread.start()
        thread.join()
        return 0

    monkeypatch.setattr(MODULES["ui"], "run", run)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    assert cli.main(["ui", "--token", value]) == 0
    unseen(value, home, capsys.readouterr())
    [record] = caplog.records
    assert record.exc_info and value not in HidingFormatter().format(record)


def test_the_real_command_hides_it(home: Path) -> None:
    """launch.py itself, in a process, with a port that is taken."""
    value = "a-token-of-many-letters"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), "ui", f"--token={value}", f"--port={taken.getsockname()[1]}"],
            env={**os.environ, "MOESTRO_TOKEN": value},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2 and "cannot be used" in done.stderr
    assert value not in done.stderr + done.stdout
