"""Positioned reads of whole pages, bypassing the system's file cache where the file system allows it.

Moestro caches expert bytes itself, under a budget; a second copy in the file cache would only evict other programs'
pages. Where direct reads are unavailable, the system is advised to drop the pages that were read.
"""

import io
import os
import threading
from pathlib import Path
from typing import NamedTuple

from core.memory.pages import PAGE, aligned


class Stamp(NamedTuple):
    """A file's identity as the system reports it; `modified` in nanoseconds."""

    inode: int
    bytes: int
    modified: int


class PageFile:
    """One open file. Thread-safe: reads do not share a file position.

    `why_buffered` is "" when reads bypass the file cache, else the reason in words. Raises OSError.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self.why_buffered = self._open_direct(path) if direct else "they were switched off"
        if self._file is None:
            self._file = io.FileIO(path)

    def _open_direct(self, path: Path) -> str:
        """Open for direct reads and try one; returns the reason when they are unavailable, else ""."""
        if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
            return "this system has none for programs like this one"
        os.stat(path)  # a missing file must raise, not fall back to buffered reads
        try:
            file = io.FileIO(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            return f"the file system refuses them: {error.strerror}"
        try:
            os.preadv(file.fileno(), [aligned(PAGE).numpy().data], 0)
        except OSError as error:
            file.close()
            return f"the file system refuses them: {error.strerror}"
        self._file = file
        return ""

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`: both must be whole pages, and the buffer page-aligned for direct reads.

        Interrupted and short reads are resumed. Raises OSError, and EOFError when the file is too short.
        """
        assert self._file is not None
        done = 0
        while done < len(buffer):
            got = self._some(self._file, buffer[done:], offset + done)
            if done + got < len(buffer) and not self.why_buffered:
                got = got // PAGE * PAGE  # the next direct read must also start on a page
            if not got:
                raise EOFError("it is shorter than it should be")
            done += got
        if self.why_buffered and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def stamp(self) -> Stamp:
        """Identifies the open file and its last write, to detect writes and a file replaced before opening."""
        assert self._file is not None
        found = os.fstat(self._file.fileno())
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)

    def _some(self, file: io.FileIO, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [buffer], offset)
        with self._lock:  # the file has a single position: seek and read must be atomic
            file.seek(offset)
            return file.readinto(buffer) or 0

    def close(self) -> None:
        """Release the file; may be called twice. No read may be running."""
        if self._file is not None:
            self._file.close()
