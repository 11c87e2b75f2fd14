"""Lock file for a single writer: the system releases the lock when the holding process ends, however it ends."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from core.errors import ModelError

OURS_BYTES = 32  # maximum size of a lock file's content


class Lock:
    """Holds `file` locked from construction to `release`. A file left behind by a killed process blocks no other
    process.

    The file contains the holder's process id, for information. Raises ModelError when another process holds it,
    OSError.
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
            os.close(self._fd)  # its last holder unlinked it meanwhile: another process may lock a new one
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def _still_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._file), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock and remove the file; may be called twice."""
        if self._fd < 0:
            return
        if sys.platform != "win32":  # POSIX can unlink a locked file, which leaves no gap
            self._file.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        if sys.platform == "win32":
            try:
                self._file.unlink(missing_ok=True)
            except OSError:
                pass  # another process already holds it


def clear(folder: Path) -> None:
    """Remove the locks that killed imports left in a folder of packs. Held locks stay.

    The file is unlinked while this process has it locked, and `Lock` checks afterwards that the file it locked still
    has its name, so two processes can never hold it at once; a process that tries to lock in that moment gets the error
    that another import is writing.
    """
    for file in folder.glob("*.lock"):
        try:
            found = file.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_size <= OURS_BYTES and _is_ours(file.read_bytes()):
                Lock(file, "{}").release()
        except (ModelError, OSError):
            pass  # held by another process or owned by another user, or already removed


def _is_ours(text: bytes) -> bool:
    """Whether the content is what `Lock` writes: empty, or a process id."""
    return not text or text.strip().isdigit()


if sys.platform == "win32":
    import msvcrt

    FAR = 1 << 30  # the locked byte lies behind the text, which stays readable

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
