"""A message queue in shared memory, with one writing and one reading process; neither ever waits.

int64, int64     bytes written so far, bytes read so far
ring             frames one after the other, wrapping around at the end

uint32, uint32   of a frame: its length and its checksum, for the reader may see the count before all of the bytes
message
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import sys
import tempfile
import zlib

FRAME = struct.Struct("=II")
COUNTS = 16


class Ring:
    """A queue in `memory`, which must be all zero initially."""

    def __init__(self, memory: memoryview) -> None:
        self._counts, self._data = memory[:COUNTS].cast("q"), memory[COUNTS:]
        self._size = len(self._data)

    def put(self, message: bytes) -> bool:
        """Add a message; returns False and adds nothing when there is no room."""
        written, frame = self._counts[0], FRAME.pack(len(message), zlib.crc32(message)) + message
        if len(frame) > self._size - (written - self._counts[1]):
            return False
        at = written % self._size
        first = min(len(frame), self._size - at)
        self._data[at : at + first] = frame[:first]
        self._data[: len(frame) - first] = frame[first:]
        self._counts[0] = written + len(frame)
        return True

    def get(self) -> bytes | None:
        """The oldest message, or None."""
        read = self._counts[1]
        there = self._counts[0] - read
        if there < FRAME.size:
            return None
        length, checksum = FRAME.unpack(self._bytes(read, FRAME.size))
        if length > there - FRAME.size:
            return None
        message = self._bytes(read + FRAME.size, length)
        if zlib.crc32(message) != checksum:
            return None
        self._counts[1] = read + FRAME.size + length
        return message

    def _bytes(self, start: int, count: int) -> bytes:
        at = start % self._size
        first = bytes(self._data[at : at + count])
        return first if len(first) == count else first + bytes(self._data[: count - len(first)])


if sys.platform == "win32":

    def share(size: int) -> tuple[mmap.mmap, str, tuple[int, ...]]:
        """(shared memory of `size` bytes, the handle by which another process joins it, files that process must
        inherit)."""
        name = f"moestro-{secrets.token_hex(16)}"
        return mmap.mmap(-1, size, tagname=name), name, ()

    def join(word: str, size: int) -> mmap.mmap:
        """The shared memory of another process, by its handle."""
        return mmap.mmap(-1, size, tagname=word)

else:

    def share(size: int) -> tuple[mmap.mmap, str, tuple[int, ...]]:
        """(shared memory of `size` bytes, the handle by which another process joins it, files that process must
        inherit)."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("moestro")
        else:
            with tempfile.TemporaryFile() as nameless:
                file = os.dup(nameless.fileno())
        os.ftruncate(file, size)
        return mmap.mmap(file, size), str(file), (file,)

    def join(word: str, size: int) -> mmap.mmap:
        """The shared memory of another process, by its handle."""
        memory = mmap.mmap(int(word), size)
        os.close(int(word))
        return memory
