"""A command whose output nobody reads any more ends quietly: `launch.py models | head -1`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from app import cli
from app.cli import CLOSED, MODULES
from tests.pack.packs import write_pack
from tests.selection import layered

ROOT = Path(__file__).resolve().parents[2]
NOISE = ("Exception ignored", "Traceback", "BrokenPipe", "Errno")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """The writing end of a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as stream:
        yield stream


@pytest.mark.parametrize("words", [["models"], ["models", "--json"], ["eval", "--list"], ["settings"], ["data"]])
def test_its_output_is_closed(words: list[str], unread: TextIO, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    write_pack(home / "packs" / "Some")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        assert cli.main(words) == CLOSED
    unread.write("this is thrown away")  # nor does what is written later, at the interpreter's end, fail
    unread.flush()
    assert not (home / "moestro.log").exists()


@pytest.mark.parametrize("words", [["models", "--delete", "Nobody"], ["chat", "--model", "nowhere", "--prompt", "x"]])
def test_its_errors_are_closed(words: list[str], unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", unread)
        assert cli.main(words) == CLOSED


def test_another_pipe_that_breaks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker process that died is no reader that has left."""

    def run(args: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(MODULES["models"], "run", run)
    assert cli.main(["models"]) == 1
    assert "Unexpected error" in capsys.readouterr().err and (home / "moestro.log").exists()


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    layered(
        [(["models"], ""), (["models"], "1"), (["settings"], ""), (["eval", "--help"], "")],
        quick=lambda case: case == (["models"], ""),
    ),
)
def test_the_process_ends_without_noise(words: list[str], unbuffered: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), *words],
            stdout=writes,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writes)
    assert done.returncode in (CLOSED, 0 if "--help" in words else CLOSED)
    assert not any(word in done.stderr for word in NOISE), done.stderr
