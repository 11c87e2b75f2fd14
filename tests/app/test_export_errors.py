"""Exports that fail: a full disk, a folder that cannot be written, what is not there."""

from __future__ import annotations

import errno
import io
import time
import zipfile
from pathlib import Path
from typing import IO, Any

import pytest

from app.services.exports import archive
from app.services.host import Host
from tests.app.test_export import read
from tests.app.test_export import two_chats as two_chats


class FullDisk(io.FileIO):
    """A file on a disk that is full after 4096 bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_told_and_leaves_no_half_file(two_chats: tuple[Host, int, int], tmp_path: Path) -> None:
    host, chat, _ = two_chats
    path = tmp_path / "out" / "chat.zip"
    path.parent.mkdir()
    path.write_bytes(b"an older export")
    before = host.chats.messages(chat)

    def full(path: Path) -> IO[bytes]:
        return FullDisk(path, "xb")

    with pytest.raises(archive.ExportError, match="The disk is full") as told:
        archive.write(host.store, path, chat=chat, opener=full)
    assert "as they were" in str(told.value)
    assert [p.name for p in path.parent.iterdir()] == ["chat.zip"]
    assert path.read_bytes() == b"an older export"
    assert host.chats.messages(chat) == before
    archive.write(host.store, path, chat=chat)  # with room again
    assert len(read(path)[0]["tokens"]) == 26


def test_a_folder_that_cannot_be_written_is_told(two_chats: tuple[Host, int, int], tmp_path: Path) -> None:
    host, chat, _ = two_chats
    (tmp_path / "file").write_text("")
    with pytest.raises(archive.ExportError, match="could not be written"):
        archive.write(host.store, tmp_path / "file" / "chat.zip", chat=chat)


def test_what_is_not_there_is_told(host: Host, tmp_path: Path) -> None:
    with pytest.raises(archive.NothingThere):
        archive.write(host.store, tmp_path / "x.zip", chat=99)
    with pytest.raises(archive.NothingThere):
        archive.write(host.store, tmp_path / "x.zip", load=99)
    assert not (tmp_path / "x.zip").exists()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(("year", "stamped"), [(1970, 1980), (1979, 1980), (2026, 2026), (2107, 2107), (2150, 2107)])
def test_a_clock_that_zip_cannot_say_is_no_obstacle(
    two_chats: tuple[Host, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: int, stamped: int
) -> None:
    host, chat, _ = two_chats
    monkeypatch.setattr(time, "localtime", lambda *_: time.struct_time((year, 5, 4, 3, 2, 1, 0, 124, 0)))
    path = archive.write(host.store, tmp_path / "chat.zip", chat=chat)
    with zipfile.ZipFile(path) as made:
        assert {one.date_time[0] for one in made.infolist()} == {stamped}
        assert {one.compress_type for one in made.infolist()} == {zipfile.ZIP_DEFLATED}
        assert made.testzip() is None
