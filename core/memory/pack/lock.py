"""Lock file for a single writer: the system releases the lock when the holding process ends, however it ends."""

import os
import stat
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from core.errors import ModelError

OURS_BYTES = 32  # maximum size of a lock file's content
WAIT_S = 0.1  # for a holder that is releasing it at this moment


class Lock:
    """Holds `file` locked from construction to `release`. A file left behind by a killed process blocks no other
    process.

    The file contains the holder's process id, for information. Raises ModelError when another process holds it, or
    when another program made a file of this name; OSError.
    """

    def __init__(self, file: Path, busy: str) -> None:
        if not _is_free(file):
            raise ModelError(
                f"{file} is in the way: Moestro did not make it, and needs this name while it writes. Move it away, or "
                "choose another name."
            )
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o644))  # says why it cannot be made, which FileLock does not
        self._file = file
        self._lock = FileLock(file, timeout=WAIT_S, thread_local=False, fallback_to_soft=False, on_acquired=_sign)
        try:
            self._lock.acquire()
        except Timeout:
            holder = _holder(file)
            raise ModelError(busy.format(f" (process {holder})" if holder else "")) from None

    def release(self) -> None:
        """Unlock and remove the file; may be called twice."""
        if not self._lock.is_locked:
            return
        if sys.platform != "win32":  # POSIX can unlink a locked file, which leaves no gap
            self._file.unlink(missing_ok=True)
        self._lock.release()  # on Windows it also removes the file


def clear(folder: Path) -> None:
    """Remove the locks that killed imports left in a folder of packs. Held locks stay.

    The file is unlinked while this process has it locked, and `Lock` tries again when the file it locked has lost its
    name, so two processes can never hold it at once.
    """
    for file in folder.glob("*.lock"):
        try:
            Lock(file, "{}").release()
        except (ModelError, OSError):
            pass  # held by another process, another program's or another user's, or already removed


def _sign(fd: int) -> None:
    """Write the process id after the first byte, which is locked: on Windows no other process can read that one."""
    os.ftruncate(fd, 0)
    os.write(fd, f" {os.getpid()}\n".encode())


def _holder(file: Path) -> str:
    """The process id in a lock file; "" when the holder has just removed it."""
    try:
        return _content(file).decode(errors="replace").strip()
    except OSError:
        return ""


def _is_free(file: Path) -> bool:
    """Whether there is no file of this name, or only one that a `Lock` wrote: empty, or a process id."""
    try:
        found = file.lstat()
        text = _content(file) if stat.S_ISREG(found.st_mode) and found.st_size <= OURS_BYTES else b"?"
    except FileNotFoundError:
        return True
    return not found.st_size or text.strip().isdigit()


def _content(file: Path) -> bytes:
    """What follows a lock file's first byte, which is locked on Windows. Raises OSError."""
    with file.open("rb", buffering=0) as text:
        text.seek(1)
        return text.read(OURS_BYTES) or b""
