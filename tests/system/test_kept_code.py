"""Machine code that later processes take out of a folder."""

import ctypes
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.system.native import kept_code
from core.system.native.compile import compiled, supported
from core.system.native.ir import Code
from tests.logged import Logged

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = kept_code._folder
    kept_code.keep_in(tmp_path / "kernels")
    yield tmp_path / "kernels"
    kept_code.keep_in(before)


def number(value: int) -> int:
    """Out of a function that was compiled, or loaded, to store it."""
    code = Code("void @store(ptr noalias %out)")
    code.store("i64", str(value), "%out", 8)
    out = ctypes.c_int64()
    compiled(code)["store"](ctypes.addressof(out))
    return out.value


def test_it_is_compiled_once_and_a_damaged_file_once_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = list[Path](), kept_code._write
    monkeypatch.setattr(kept_code, "_write", lambda file, code: written.append(file) or write(file, code))
    assert [number(5), number(5), number(6), number(5)] == [5, 5, 6, 5]
    five, six = written
    assert sorted(folder.iterdir()) == sorted((five, six))
    whole = five.read_bytes()
    for damaged in (b"", whole[:40], whole[:-1] + bytes([whole[-1] ^ 1])):
        five.write_bytes(damaged)
        assert number(5) == 5 and five.read_bytes() == whole
    assert len(written) == 5


def test_what_nobody_has_used_for_long_is_removed_once_a_process(folder: Path) -> None:
    folder.mkdir()
    old = time.time() - kept_code.UNUSED_S - 60
    unused, partial, other, used = (folder / name for name in ("0" * 64, f"{'1' * 64}.7.partial", "mine", "2" * 64))
    for file in (unused, partial, other, used):
        file.write_text("")
        os.utime(file, None if file == used else (old, old))
    assert number(5) == 5
    (five,) = {*folder.iterdir()} - {other, used}
    os.utime(five, (old, old))
    assert number(5) == 5 and five.stat().st_mtime > old + 60, "it was used"
    os.utime(used, (old, old))
    assert number(6) == 6 and used.exists(), "a later process removes it"


def test_a_folder_that_cannot_be_written_is_said_and_nothing_else(tmp_path: Path, folder: Path, caplog: Logged) -> None:
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING, "moestro.kernels"):
        assert [number(5), number(6)] == [5, 6]
    assert caplog.text.count("are not kept") == 1
