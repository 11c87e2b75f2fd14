"""The fake GPU itself: it finds what nothing orders and nothing else, and counts memory as torch's allocators do."""

import random
import threading

import pytest
import torch

from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.clocks import Clocks, Event, Stream
from tests.fake_cuda.faults import Faults
from tests.fake_cuda.memory import MIB, DeviceMemory
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


def test_an_event_is_reached_some_time_and_has_no_time_before() -> None:
    clocks = Clocks(random.Random(0), Faults())
    stream, begin, end = Stream(clocks), Event(clocks, True), Event(clocks, True)
    assert begin.query()  # nothing was recorded
    begin.record(stream)
    end.record(stream)
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)
    assert True in [end.query() for _ in range(64)]
    assert begin.elapsed_time(end) > 0


def test_a_segment_is_shared_kept_and_given_back() -> None:
    memory = DeviceMemory(64 * MIB)
    small = memory.allocate(1000)
    assert (memory.allocated, memory.reserved) == (1024, 2 * MIB)
    first = memory.allocate(3 * MIB)
    second = memory.allocate(9 * MIB)
    assert memory.reserved == 22 * MIB  # both in one segment of 20
    memory.free(*first)
    memory.empty_cache()
    assert memory.reserved == 22 * MIB  # it is still in use
    memory.free(*second)
    large = memory.allocate(11 * MIB)
    assert memory.reserved == 22 * MIB  # the freed parts were joined
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(43 * MIB)
    whole = memory.allocate(42 * MIB)
    assert memory.available == 0
    for one in (small, large, whole):
        memory.free(*one)
    memory.empty_cache()
    assert (memory.allocated, memory.reserved) == (0, 0) and memory.most_reserved == 64 * MIB


def test_tensors_count_while_they_live_and_know_their_device(fake: FakeCuda) -> None:
    with installed(fake):
        x = torch.zeros(1 << 18, device="cuda")
        assert str(x.device) == "cuda:0" and x.is_cuda and not x.cpu().is_cuda
        y = x + 1
        assert y.is_cuda and y.view(-1, 2)[0].is_cuda and x.new_empty(3).is_cuda and torch.empty_like(x).is_cuda
        assert fake.memory.allocated == 2 << 20
        layer = torch.nn.Linear(512, 512).to("cuda")
        assert layer(x.view(512, 512)).is_cuda
        assert fake.memory.allocated == (3 << 20) + 2048
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(1 << 18)
        with pytest.raises(TypeError):
            x.numpy()
        del x, y, layer
        assert fake.memory.allocated == 0


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


def test_a_lost_device_does_nothing_more(fake: FakeCuda) -> None:
    with installed(fake):
        fake.faults.lose_device(lambda call: call == "event.record")
        x = torch.zeros(4, device="cuda")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            torch.cuda.Event().record()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            x + 1


def test_a_graph_computes_when_it_is_replayed_and_what_its_inputs_then_are(fake: FakeCuda) -> None:
    with installed(fake):
        x, kept = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = (x.view(2, 2) * 2).sum()
            kept.copy_(x + 1)
        assert bool(y.isnan())
        graph.replay()
        assert float(y) == 8 and kept.tolist() == [2] * 4
        x.fill_(3)
        graph.replay()
        assert float(y) == 24 and kept.tolist() == [4] * 4


@pytest.mark.parametrize("what", ["item", "synchronize", "pin", "copy"])
def test_who_captures_waits_for_nothing(fake: FakeCuda, what: str) -> None:
    with installed(fake):
        x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        calls = {
            "item": lambda: x.sum().item(),
            "synchronize": torch.cuda.synchronize,
            "pin": lambda: torch.zeros(4).pin_memory(),
            "copy": lambda: torch.zeros(4).to("cuda"),
        }
        with (
            pytest.raises(RuntimeError, match="previous error during capture"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
            pytest.raises(RuntimeError, match="not permitted"),
        ):
            calls[what]()
        with pytest.raises(RuntimeError, match="without a preceding"):
            graph.replay()
