"""Bytes and names that are on the disk when a call returns, and stay there when the power fails."""

from __future__ import annotations

import io
import os
from pathlib import Path


def sync_file(fd: int) -> None:
    """Wait until an open file's bytes are on the disk."""
    os.fsync(fd)


def sync_dir(directory: Path) -> None:
    """Wait until the names in a directory are on the disk. Windows offers no such thing, and needs none on NTFS."""
    if os.name == "posix":
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(handle: io.FileIO, raw: memoryview) -> None:
    """Write everything: an unbuffered file may take less at a time."""
    done = 0
    while done < len(raw):
        done += handle.write(raw[done:])


def replace(file: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one at every moment."""
    fresh = file.with_name(f"{file.name}.new")
    with fresh.open("wb") as handle:
        handle.write(text.encode())
        handle.flush()
        sync_file(handle.fileno())
    os.replace(fresh, file)
    sync_dir(file.parent)
