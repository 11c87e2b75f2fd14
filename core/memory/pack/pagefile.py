"""Positioned reads of whole pages, past the system's file cache where the file system allows it.

Expert bytes are cached by Moestro itself, under a budget; a second copy in the file cache would only push out what
other programs keep there. Where direct reads are not to be had, the cache is told to forget what was read.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import NamedTuple

from core.memory.pages import PAGE, aligned


class Stamp(NamedTuple):
    """A file as the system describes it; `modified` in nanoseconds."""

    inode: int
    bytes: int
    modified: int


class PageFile:
    """One open file. Thread-safe: no read depends on where another one left off.

    `why_buffered` is "" when reads go past the file cache, else the reason in words. Raises OSError.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self.why_buffered = self._open_direct(path) if direct else "they were switched off"
        if self._file is None:
            self._file = io.FileIO(path)

    def _open_direct(self, path: Path) -> str:
        """Open for direct reads and try one; the reason when that cannot be."""
        if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
            return "this system has none for programs like this one"
        os.stat(path)  # a file that is not there is no matter of direct reads
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
        """Fill `buffer` from `offset`: whole pages both, and a page-aligned buffer for direct reads.

        Interrupted and short reads are taken up again. Raises OSError, and EOFError when the file ends before.
        """
        assert self._file is not None
        done = 0
        while done < len(buffer):
            got = self._some(self._file, buffer[done:], offset + done)
            if done + got < len(buffer) and not self.why_buffered:
                got = got // PAGE * PAGE  # the next direct read has to start on a page too
            if not got:
                raise EOFError("it is shorter than it should be")
            done += got
        if self.why_buffered and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def stamp(self) -> Stamp:
        """What tells whether somebody has written to the file, or put another in its place before it was opened."""
        assert self._file is not None
        found = os.fstat(self._file.fileno())
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)

    def _some(self, file: io.FileIO, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [buffer], offset)
        with self._lock:  # the file has one position: seek and read belong together
            file.seek(offset)
            return file.readinto(buffer) or 0

    def close(self) -> None:
        """Release the file; may be called twice. No read may be going on."""
        if self._file is not None:
            self._file.close()
