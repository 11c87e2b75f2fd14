"""Files of somebody else's, and split GGUF models: reading ends, takes bounded memory, and says what is wrong."""

import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.services.candidates import look
from core.errors import ModelError, TraceError
from core.importing.sources.gguf.files import find_files
from core.system.gguf_parts import missing, part_of, parts_in
from core.system.reading import BadJson, open_regular, parse_json, read_bytes, read_json, read_text, shown
from tests.app.test_library import gguf

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


ODD: list[tuple[Callable[[Path], None], str]] = [
    (_fifo, "a pipe"),
    (_zero, "a device"),
    (_loop, "symbolic links"),
    (Path.mkdir, "a folder"),
    (_huge, "at most"),
    (lambda path: path.symlink_to(path.parent / "nowhere"), "No such file"),
    (lambda path: None, "No such file"),
    (lambda path: path.write_bytes(b"\xff\xfe{}"), "not UTF-8"),
    (lambda path: path.write_text("{" * 8), "not JSON"),
    (lambda path: path.write_text("[" * 10**6), "nested deeper"),
    (lambda path: path.write_bytes(b""), "not JSON"),
]


@posix
@pytest.mark.parametrize(("make", "said"), ODD)
@pytest.mark.timeout(120)
def test_whatever_lies_there_is_refused_with_its_path(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    path = tmp_path / "config.json"
    make(path)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=said) as caught:
            read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_a_file_that_the_system_refuses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: object) -> int:
        raise PermissionError(13, "Permission denied", "config.json")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelError, match=r"Permission denied.*permissions"):
        read_text(tmp_path / "config.json", 100)


def test_a_name_that_no_system_takes_is_refused() -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_bytes("a\0b", 100, TraceError)


@posix
def test_a_pipe_is_not_even_opened(tmp_path: Path) -> None:
    """A writer that waits for a reader goes on waiting: nothing of somebody else's pipe is taken."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)


def test_good_json_is_what_python_reads(tmp_path: Path) -> None:
    body = {"a": [1, 2.5, None, True, "ü\U0001f600"], "b": {"c": {"a": -1e300}}, "big": 2**70}
    (tmp_path / "x.json").write_text(json.dumps(body))
    assert read_json(tmp_path / "x.json") == body
    if os.name != "nt":
        (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
        assert read_json(tmp_path / "link.json") == body


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        ('{"a": NaN}', "NaN"),
        ("[-Infinity]", "-Infinity"),
        ("[1e999]", "too large"),
        ('["\\ud800"]', "half of a surrogate"),
        ('{"\\udc00x": 1}', "half of a surrogate"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "deeper than 64"),
        ("[" + "9" * 5000 + "]", "digits"),
        ("\ufeff{}", "BOM"),
        ("", "line 1"),
        ("{} x", "Extra data"),
    ],
)
def test_json_that_could_mean_two_things_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadJson, match=said):
        parse_json(text)


def test_limits_are_reached_and_not_passed(tmp_path: Path) -> None:
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('["\\ud83d\\ude00"]') == ["\U0001f600"]
    assert parse_json(b"[Infinity]", nonfinite=True) == [float("inf")]
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(ModelError, match="4 at most"):
        read_bytes(tmp_path / "x", 4)


def test_files_that_say_they_are_empty_are_read_up_to_the_limit() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    assert b"Pid" in read_bytes("/proc/self/status", 1 << 20)
    with pytest.raises(ModelError, match="100 at most"):
        read_bytes("/proc/self/status", 100)


def test_deep_nesting_is_refused_on_a_thread_with_a_small_stack() -> None:
    """What the dashboard's threads are: an overflow there would end the process."""
    said: list[str] = []

    def read() -> None:
        with pytest.raises(BadJson) as caught:
            parse_json('{"a":[' * 200_000)
        said.append(str(caught.value))

    old = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=read)
        thread.start()
    finally:
        threading.stack_size(old)
    thread.join()
    assert said == ["its JSON is nested deeper than 64 levels"]


def test_every_path_can_be_shown() -> None:
    assert shown(Path("/a/ü")) == str(Path("/a/ü"))
    shown("/a/\udcff\ud800").encode()


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path that is looked up while a test runs."""
    asked: list[str] = []
    stat = os.stat

    def counting(path: Any, *more: Any, **how: Any) -> os.stat_result:
        asked.append(str(path))
        return stat(path, *more, **how)

    monkeypatch.setattr(os, "stat", counting)
    return asked


@pytest.mark.parametrize("name", ["x-00001-of-99999.gguf", "x-00001-of-4294967296.gguf"])
def test_parts_that_do_not_exist_cost_nothing(tmp_path: Path, stats: list[str], name: str) -> None:
    file = gguf(tmp_path / name)
    entry = look(file, "folder")
    assert entry is not None and entry.bytes == file.stat().st_size
    if "99999" in name:
        assert "99998 of its 99999 files are missing" in entry.problem
        with pytest.raises(ModelError, match=r"99998 of the 99999 parts .*x-00002-of-99999.gguf.*\.\.\. Download"):
            find_files(file)
    assert len(stats) < 100, "files that are not there were looked for"


def test_many_split_models_in_a_folder_are_listed_from_one_reading(tmp_path: Path, stats: list[str]) -> None:
    data = gguf(tmp_path / "whole.gguf").read_bytes()
    for model in range(20):
        for number in (1, 2):
            (tmp_path / f"m{model}-0000{number}-of-00002.gguf").write_bytes(data)
    found = [entry for file in sorted(tmp_path.iterdir()) if (entry := look(file, "folder")) is not None]
    assert len(found) == 21 and not any(entry.problem for entry in found)
    assert {entry.bytes for entry in found} == {len(data), 2 * len(data)}


def test_parts_are_those_of_their_own_model(tmp_path: Path) -> None:
    for name in ("a-00001-of-00003.gguf", "a-00003-of-00003.gguf", "a-00002-of-00004.gguf", "b-00002-of-00003.gguf"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a-00002-of-00003.gguf").mkdir()
    (tmp_path / "a-00009-of-00003.gguf").write_bytes(b"")
    part = part_of("a-00001-of-00003.gguf")
    assert part == ("a", 1, 3) and parts_in(tmp_path)["a", 3] == {1, 3}
    assert missing(part, parts_in(tmp_path)["a", 3], 5) == ["a-00002-of-00003.gguf"]
    assert part_of("a.gguf") is None and part_of("a-1-of-3.gguf") is None
