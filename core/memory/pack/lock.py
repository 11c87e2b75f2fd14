"""One writer at a time: a lock that the system drops when its holder ends, however it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from core.errors import ModelError


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
