"""Paths that users give: an unknown "~user", a place where nothing can be written, a file that is there already."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import pytest

from app import cli
from app.cli import CLOSED, MODULES, build_parser
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.calibrator import Reading
from app.services.candidates import is_pack
from app.services.host import Host
from app.services.library import cached, scan
from app.store import Store
from app.store.home import data_dir
from app.ui.sidebar.model import is_gone
from core.errors import MoestroError
from core.importing import import_model
from core.system.paths import expanded
from tests.app.conftest import open_host
from tests.pack.packs import write_pack
from tests.selection import layered

NOBODY = "~nosuchuser/models/x"
TAKEN = "exists already, and nothing is ever overwritten"
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_a_path_is_expanded() -> None:
    assert expanded("~") == Path.home() and expanded("~/a") == Path.home() / "a"
    assert expanded("a/~b") == Path("a/~b") and expanded(Path("")) == Path()
    for wrong, words in ((NOBODY, "~nosuchuser is not the home folder"), ("a\0b", "NUL")):
        with pytest.raises(MoestroError, match=words):
            expanded(wrong)


def test_every_option_with_a_path_names_the_unknown_user() -> None:
    parser = build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    tried = 0
    for name in MODULES:
        for action in commands.choices[name]._actions:
            assert action.type is not Path, f"{name} {action.option_strings} takes a path that is not expanded"
            if action.type is expanded:
                tried += 1
                with pytest.raises(MoestroError, match="~nosuchuser is not the home folder"):
                    parser.parse_args([name, *action.option_strings[:1], NOBODY])
    assert tried >= 15


@pytest.mark.parametrize(
    "words",
    [["chat", "--model", NOBODY, "--prompt", "x"], ["import", NOBODY], ["models", "--json", "--folder", NOBODY]],
)
def test_a_command_says_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    code = cli.main(words)
    printed = capsys.readouterr()
    assert "~nosuchuser is not the home folder" in printed.out + printed.err
    assert code == (0 if words[0] == "models" else 2) and not list(tmp_path.iterdir())


def test_a_data_folder_of_nobody_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOESTRO_HOME", NOBODY)
    with pytest.raises(MoestroError, match="~nosuchuser"):
        data_dir()
    assert cli.main(["models"]) == 2
    assert "~nosuchuser is not the home folder" in capsys.readouterr().err


FIELDS: dict[str, Callable[[Host], object]] = {
    "the source of an import": lambda host: import_model(NOBODY, Path("x")),
    "the target of an import": lambda host: host.importer.start("demo", out=NOBODY),
    "a trace": lambda host: host.analyst.start(Question(RoutingSource("file", path=NOBODY), ("lru",))),
    "texts": lambda host: host.calibrator.characters(Reading(("path",), (), path=NOBODY)),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_page_names_the_unknown_user(field: str, tmp_path: Path) -> None:
    message = "~nosuchuser is not the home folder"
    with closing(open_host(tmp_path, loaded=False)) as host, pytest.raises(MoestroError, match=message):
        FIELDS[field](host)


def test_what_lists_models_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_pack(NOBODY) and not is_gone(NOBODY)
    [entry] = scan(tmp_path, [NOBODY], {NOBODY: 1.0})
    assert "~nosuchuser" in entry.problem
    monkeypatch.setenv("HF_HUB_CACHE", NOBODY)
    [entry] = cached()
    assert "~nosuchuser" in entry.problem


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.cli.chat.load", lambda spec: pytest.fail("the model was loaded first"))
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "home"))


WRITING = {
    "eval --csv": ["eval", "--csv"],
    "eval --save": ["eval", "--save"],
    "bench --save": ["bench", "quick", "--save"],
    "bench --picture": ["bench", "systems", "--picture"],
    "chat --record": ["chat", "--prompt", "x", "--record"],
    "calibrate --out": ["calibrate", "--out"],
}


@linux
@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("option", WRITING)
@pytest.mark.parametrize("folder", ["/proc", "/proc/self/nowhere"])
def test_a_result_without_a_place_is_known_at_once(
    option: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*WRITING[option], f"{folder}/result"]) == 2
    said = capsys.readouterr().err
    assert "No file can be written in /proc:" in said or f"There is no folder {folder}" in said
    assert "hoose a" in said


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("option", WRITING)
@pytest.mark.parametrize("ending", ["", ".part"])
def test_no_file_is_overwritten(option: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thesis = tmp_path / f"thesis.txt{ending}"
    thesis.write_text("mine")
    assert cli.main([*WRITING[option], str(tmp_path / "thesis.txt")]) == 2
    assert TAKEN in capsys.readouterr().err
    assert thesis.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == [thesis.name]


@pytest.mark.parametrize("place", ["file", pytest.param("/proc", marks=linux)])
@pytest.mark.parametrize("command", [["data", "--backup"], ["import", "demo"]])
def test_a_data_folder_that_cannot_be_written(
    place: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "file":
        (tmp_path / "file").write_text("")
        place = str(tmp_path / "file")
    home = Path(place) / "moestro"
    monkeypatch.setenv("MOESTRO_HOME", str(home))
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert f"Moestro keeps your data in {home}, and nothing can be written there" in said and "MOESTRO_HOME" in said


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="modes are POSIX")
def test_a_read_only_data_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(MoestroError, match="nothing can be written there: Permission denied"):
            Store(tmp_path)
    finally:
        tmp_path.chmod(0o700)


@linux
def test_an_import_to_a_place_that_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"/proc/pack cannot be written: .*choose another directory"):
        import_model("demo", Path("/proc/pack"))


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


def test_another_broken_pipe(monkeypatch: pytest.MonkeyPatch, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
