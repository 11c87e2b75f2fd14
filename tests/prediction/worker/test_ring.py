"""Messages through shared memory: in order, round the end, never half, never over what was not read."""

import ctypes
import struct
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.runtime.prediction.worker.ring import COUNTS, FRAME, Ring
from core.system.worker_process import WorkerProcess
from tests.selection import examples


@examples(40)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=30)), max_size=60))
def test_what_is_put_comes_out_in_order_and_what_has_no_room_is_refused(moves: list[bytes | None]) -> None:
    """None: the reader takes one. Room for 64 bytes, so that it often goes round."""
    ring, held = Ring(memoryview(bytearray(COUNTS + 64))), list[bytes]()
    for move in moves:
        if move is None:
            assert ring.get() == (held.pop(0) if held else None)
        else:
            room = 64 - sum(len(one) + FRAME.size for one in held)
            assert ring.put(move) is (len(move) + FRAME.size <= room)
            held += [move] * (len(move) + FRAME.size <= room)
    assert [ring.get() for _ in held] == held
    assert ring.get() is None


@pytest.mark.parametrize("torn", [0, 4, FRAME.size, FRAME.size + 3])
def test_a_message_counts_only_when_all_of_it_has_arrived(torn: int) -> None:
    """The count is there, and a byte of the length, of the checksum or of the message is not yet."""
    memory = bytearray(COUNTS + 64)
    ring = Ring(memoryview(memory))
    ring.put(b"abcdef")
    whole = memory[COUNTS + torn]
    memory[COUNTS + torn] ^= 0xFF
    assert ring.get() is None
    memory[COUNTS + torn] = whole
    assert ring.get() == b"abcdef"


def read_and_answer(pipe: Connection, memory: Any) -> None:
    """In another process."""
    view = memoryview(memory).cast("B")
    pipe.send(struct.unpack("<q", view[:8]))
    view[8:16] = struct.pack("<q", 78)
    pipe.send("written")
    pipe.recv()


def test_memory_is_shared() -> None:
    ours = RawArray(ctypes.c_byte, 4096)
    view = memoryview(ours).cast("B")
    view[:8] = struct.pack("<q", 77)
    process = WorkerProcess(read_and_answer, ours)
    assert process.pipe.recv() == (77,)
    assert process.pipe.recv() == "written"
    assert struct.unpack("<q", view[8:16]) == (78,)
    process.end()
