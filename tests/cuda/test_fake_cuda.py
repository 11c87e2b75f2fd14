"""The fake GPU itself: it finds what nothing orders and nothing else, and counts memory as torch's allocators do."""

import random
import threading

import pytest
import torch

from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.clocks import Clocks
from tests.fake_cuda.faults import Faults
from tests.fake_cuda.races import Races
from tests.fake_cuda.threads import traced_threading

SIZE = 4096


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


def copying(fake: FakeCuda, *, waits: bool, fence: bool, landed: bool) -> list[str]:
    """A slot that is read, copied into by another stream, and read again; each order can be left out."""
    with installed(fake):
        slot, row = torch.zeros(SIZE, device="cuda"), torch.ones(SIZE, pin_memory=True)
        fake.races.watch(slot.data_ptr(), slot.nbytes, "slot")
        torch.cuda.synchronize()  # the zeros above
        copies, read, copied = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        slot.sum()
        read.record()
        with torch.cuda.stream(copies):
            if fence:
                copies.wait_event(read)
            slot.copy_(row, non_blocking=True)
            copied.record()
        if waits:
            torch.cuda.current_stream().wait_event(copied)
        if landed:
            copied.synchronize()
        assert float(slot.sum()) == SIZE
        return fake.races.found


@pytest.mark.parametrize(
    ("orders", "found"),
    [
        (dict(waits=True, fence=True, landed=False), 0),
        (dict(waits=False, fence=True, landed=True), 0),
        (dict(waits=True, fence=False, landed=False), 1),  # the copy overwrites what is still read
        (dict(waits=False, fence=True, landed=False), 1),  # the slot is read before the copy is over
    ],
)
def test_only_what_nothing_orders_is_a_race(fake: FakeCuda, orders: dict[str, bool], found: int) -> None:
    assert len(copying(fake, **orders)) == found


def test_a_pinned_row_is_written_after_its_copy(fake: FakeCuda) -> None:
    for waits in (True, False):
        with installed(fake):
            slot, row = torch.zeros(SIZE, device="cuda"), torch.ones(SIZE, pin_memory=True)
            fake.races.watch(row.data_ptr(), row.nbytes, "row")
            slot.copy_(row, non_blocking=True)
            if waits:
                torch.cuda.current_stream().synchronize()
            row.fill_(2.0)
        assert bool(fake.races.found) is not waits


def test_a_pageable_row_is_read_when_its_copy_is_asked_for(fake: FakeCuda) -> None:
    with installed(fake):
        slot, row = torch.zeros(SIZE, device="cuda"), torch.ones(SIZE)
        fake.races.watch(row.data_ptr(), row.nbytes, "row")
        slot.copy_(row, non_blocking=True)
        row.fill_(2.0)
    assert not fake.races.found


def test_threads_learn_from_locks_and_events_alone() -> None:
    clocks = Clocks(random.Random(0), Faults())
    races, threads = Races(clocks), traced_threading(clocks)
    races.watch(0, 8, "row")
    region = races.region(0)
    assert region is not None

    def other(writes: object) -> None:
        thread = threading.Thread(target=writes)  # type: ignore[arg-type]
        thread.start()
        thread.join()

    def write() -> None:
        races.by_host(region, writes=True, what="write")

    def write_and_tell() -> None:
        write()
        said.set()

    said = threads.Event()
    other(write_and_tell)
    assert said.wait(60)
    write()
    assert not races.found
    other(write)
    assert len(races.found) == 1


def test_memory_freed_while_it_is_read_is_found(fake: FakeCuda) -> None:
    for waits in (True, False):
        with installed(fake):
            slot = torch.zeros(SIZE, device="cuda")
            torch.cuda.synchronize()
            fake.races.watch(slot.data_ptr(), slot.nbytes, "slot")
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                slot.sum()
            if waits:
                other.synchronize()
            fake.races.freed(slot.data_ptr())
        assert bool(fake.races.found) is not waits


def test_pinned_memory_is_rounded_up_kept_and_refused(fake: FakeCuda) -> None:
    fake.pinned.limit = 3 << 20
    with installed(fake):
        row = torch.empty((1 << 20) + 1, dtype=torch.uint8, pin_memory=True)
        assert row.is_pinned() and fake.pinned.used == 2 << 20
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.empty(2 << 20, dtype=torch.uint8, pin_memory=True)
        del row
        assert fake.pinned.used == 2 << 20
        torch._C._host_emptyCache()
        assert fake.pinned.used == 0
        slab = torch.empty(4 << 20, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        assert runtime.cudaHostRegister(slab.data_ptr(), 4 << 20, 0) != 0
        with pytest.raises(RuntimeError, match="out of memory"):  # what CUDA remembers
            torch.zeros(1, device="cuda")
        assert runtime.cudaHostRegister(slab.data_ptr(), 1 << 20, 0) == 0 and slab.is_pinned()
        assert runtime.cudaHostUnregister(slab.data_ptr()) == 0 and not slab.is_pinned()
