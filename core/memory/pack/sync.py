"""Durable writes: bytes and names that are on the disk when a call returns, and survive a power failure."""

import io
import os
from pathlib import Path


def sync_file(fd: int) -> None:
    """Wait until an open file's bytes are on the disk."""
    os.fsync(fd)


def sync_dir(directory: Path) -> None:
    """Wait until a directory's entries are on the disk. Windows has no such call, and NTFS needs none."""
    if os.name == "posix":
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(handle: io.FileIO, raw: memoryview) -> None:
    """Write everything: an unbuffered file may write only part of it per call."""
    done = 0
    while done < len(raw):
        done += handle.write(raw[done:])


def fresh_of(name: str) -> str:
    """The name under which a file's new content is written before it takes the file's place."""
    return f"{name}.new"


def replace(file: Path, text: str) -> None:
    """Write a small file atomically: at every moment it holds either the old or the new text."""
    fresh = file.with_name(fresh_of(file.name))
    fresh.unlink(missing_ok=True)  # left by a killed import, or a link: nothing is written through it
    with fresh.open("xb") as handle:
        handle.write(text.encode())
        handle.flush()
        sync_file(handle.fileno())
    os.replace(fresh, file)
    sync_dir(file.parent)
