"""A message queue in shared memory, with one writing and one reading process; neither ever waits.

int64, int64     bytes written so far, bytes read so far
ring             frames one after the other, wrapping around at the end

uint32, uint32   of a frame: its length and its checksum, for the reader may see the count before all of the bytes
message

A pipe in its place would take 6 to 18 us more a layer to give a message and to take an answer (medians on the computing
thread, the two in turn): up to 1.9 % of a token of the demo model, 6 layers in 5.8 ms. And it would wait when full.
"""

from __future__ import annotations

import struct
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
