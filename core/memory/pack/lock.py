"""One writer at a time: a lock that the system drops when its holder ends, however it ends."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from core.errors import ModelError

OURS_BYTES = 32  # most that stands in the file of a lock


class Lock:
    """Holds `file` from construction to `release`. A file that a killed process left behind locks nobody out.

    The holder's process id stands in it, for people. Raises ModelError when somebody else holds it, OSError.
    """

    def __init__(self, file: Path, busy: str) -> None:
        self._file = file
        while True:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(self._fd)
            except (BlockingIOError, PermissionError):
                holder = os.read(self._fd, 32).decode(errors="replace").strip()
                os.close(self._fd)
                raise ModelError(busy.format(f" (process {holder})" if holder else "")) from None
            except OSError:
                os.close(self._fd)
                raise
            if self._still_there():
                break
            os.close(self._fd)  # its last holder took the name away meanwhile: another may lock a new file of that name
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def _still_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._file), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let go and take the file away; may be called twice."""
        if self._fd < 0:
            return
        if sys.platform != "win32":  # there a file can be removed while it is locked, which leaves no gap
            self._file.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        if sys.platform == "win32":
            try:
                self._file.unlink(missing_ok=True)
            except OSError:
                pass  # somebody else holds it already


def clear(folder: Path) -> None:
    """Take away the locks that killed imports left in a folder of packs. One that is held stays.

    Its file is taken away while it is locked here, and `Lock` looks afterwards whether what it locked still has its
    name, so no two can hold one; whoever asks for it in that moment is told that another import is writing.
    """
    for file in folder.glob("*.lock"):
        try:
            found = file.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_size <= OURS_BYTES and _is_ours(file.read_bytes()):
                Lock(file, "{}").release()
        except (ModelError, OSError):
            pass  # it is held, by a process or by another user; or somebody was faster


def _is_ours(text: bytes) -> bool:
    """An empty file, or one with a process id, as `Lock` writes it."""
    return not text or text.strip().isdigit()


if sys.platform == "win32":
    import msvcrt

    FAR = 1 << 30  # the byte that is locked lies behind the text, which stays readable

    def _lock(fd: int) -> None:
        os.lseek(fd, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(fd, 0, os.SEEK_SET)
else:
    import fcntl

    def _lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
