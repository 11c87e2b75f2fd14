"""The files of the data folder are readable by their user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.store import Store
from app.store.check import NAME
from tests.app.stores import filled


def _modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}


@pytest.mark.skipif(os.name == "nt", reason="Windows has access lists, not modes")
def test_files_are_their_users_alone_also_old_ones(tmp_path: Path) -> None:
    home = tmp_path / "data"
    before = os.umask(0)
    try:
        filled(home)
        (home / "exports").mkdir()
        (home / "exports" / "old.zip").write_bytes(b"x")
        (home / "packs" / "mine").mkdir(parents=True)
        (home / "packs" / "mine" / "experts.bin").write_bytes(b"x")
        (home / "mine.txt").write_text("not Moestro's")
        for name in (".", NAME):
            (home / name).chmod(0o777)
        store = Store(home)
        store.backups.make()
        store.chats.begin(None, "hello", "demo")
        modes = _modes(home)
        store.close()
    finally:
        os.umask(before)
    assert modes.pop("mine.txt") == 0o666
    assert modes.pop("packs/mine") == 0o777
    assert modes.pop("packs/mine/experts.bin") == 0o666
    assert {f"{NAME}-wal", f"{NAME}-shm"} <= set(modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
