"""Messages through shared memory: in order, round the end, never half, never over what was not read."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.prediction.worker.ring import COUNTS, FRAME, Ring, join, share


@settings(max_examples=40, deadline=None)
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


def test_memory_is_shared() -> None:
    ours, word, files = share(4096)
    theirs = join(word, 4096)  # closes the file, as a process does with its own
    assert len(files) <= 1
    ours[:8] = struct.pack("<q", 77)
    assert struct.unpack("<q", theirs[:8]) == (77,)
