"""The link: demand before prefetch, cancelling, pacing. Synchronised on events, never on elapsed time."""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from core.errors import ModelError
from core.memory.arena import Slot
from core.memory.link import Pace, measure_gbps
from core.memory.transfer import CANCELLED, LANDED, QUEUED, Ticket, TransferEngine
from core.types import Segment

CPU = torch.device("cpu")
DISK = 42  # the eid that a Gate reads from disk


class Gate:
    """A `fetch` that notes the order of copies and holds the first one until it is opened."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.opened, self.entered = threading.Event(), threading.Event()

    def __call__(self, eid: int, targets: Sequence[torch.Tensor], first: int = 0) -> int:
        self.order.append(eid)
        self.entered.set()
        self.opened.wait(60)
        for target in targets:
            target.fill_(eid)
        return 4096 if eid == DISK else 0


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def link(gate: Gate) -> Iterator[TransferEngine]:
    engine = TransferEngine(CPU, gate)
    yield engine
    gate.opened.set()
    engine.close()


def ticket(eid: int, demand: bool = False, size: int = 64) -> Ticket:
    slot = Slot(eid, torch.zeros(size, dtype=torch.uint8))
    return Ticket(Segment(eid, range(1)), [slot], size, demand, "decode")


def busy(link: TransferEngine, gate: Gate) -> Ticket:
    first = link.submit(ticket(99))
    assert gate.entered.wait(60)
    return first


def test_demand_goes_before_every_queued_prefetch(link: TransferEngine, gate: Gate) -> None:
    busy(link, gate)
    queued = [link.submit(ticket(1)), link.submit(ticket(2)), link.submit(ticket(3, demand=True))]
    gate.opened.set()
    for one in queued:
        one.done.wait(60)
    assert gate.order == [99, 3, 1, 2]
    assert all(int(one.slots[0].raw[0]) == one.eid for one in queued)


def test_a_promoted_prefetch_is_a_demand(link: TransferEngine, gate: Gate) -> None:
    first = busy(link, gate)
    queued = [link.submit(ticket(1)), link.submit(ticket(2))]
    assert link.promote(queued[1])
    assert not link.promote(first)  # it has started
    gate.opened.set()
    for one in queued:
        one.done.wait(60)
    assert gate.order == [99, 2, 1]


def test_only_queued_copies_can_be_cancelled(link: TransferEngine, gate: Gate) -> None:
    first = busy(link, gate)
    queued = link.submit(ticket(1))
    assert link.cancel(queued)
    assert link.cancel(queued)
    assert queued.state == CANCELLED
    assert not link.cancel(first)
    gate.opened.set()
    link.wait(first)
    assert first.state == LANDED
    assert gate.order == [99]


def test_who_waits_for_a_queued_copy_makes_it(link: TransferEngine, gate: Gate) -> None:
    busy(link, gate)
    mine = link.submit(ticket(7, demand=True))
    threading.Timer(0.05, gate.opened.set).start()
    link.wait(mine)  # the worker is held: this thread copies
    assert int(mine.slots[0].raw[0]) == 7


def test_an_idle_worker_keeps_no_slot(link: TransferEngine, gate: Gate) -> None:
    freed = threading.Event()
    last = ticket(1)
    weakref.finalize(last.slots[0].raw, freed.set)
    gate.opened.set()
    link.submit(last)
    assert last.done.wait(60)
    link.forget()
    del last
    assert freed.wait(60)


def test_a_failed_copy_is_reported_where_it_is_waited_for(gate: Gate) -> None:
    def broken(eid: int, targets: Sequence[torch.Tensor], first: int) -> int:
        raise ValueError("no such bytes") if eid == 1 else ModelError("The pack is damaged.")

    engine = TransferEngine(CPU, broken)
    with pytest.raises(RuntimeError, match="copy of expert weights failed"):
        engine.wait(engine.submit(ticket(1, demand=True)))
    with pytest.raises(ModelError, match="pack is damaged"):  # what is meant for the user reaches the user
        engine.wait(engine.submit(ticket(2, demand=True)))
    engine.close()


def test_two_workers_copy_two_experts_at_once(gate: Gate) -> None:
    engine = TransferEngine(CPU, gate, workers=2)
    both = [engine.submit(ticket(1)), engine.submit(ticket(DISK))]
    while len(gate.order) < 2:  # neither has ended: the gate is shut
        assert gate.entered.wait(60)
    gate.opened.set()
    for one in both:
        engine.wait(one)
    assert sorted(gate.order) == [1, DISK]
    assert [one.disk_bytes for one in both] == [0, 4096]
    engine.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_prefetch_starts_while_a_demand_is_queued_or_under_way(gate: Gate, workers: int) -> None:
    engine = TransferEngine(CPU, gate, workers=workers)
    demand = engine.submit(ticket(1, demand=True))
    assert gate.entered.wait(60)
    ahead = engine.submit(ticket(2))  # other workers are idle, and stay so
    assert not ahead.done.wait(0.05)
    assert gate.order == [1] and ahead.state == QUEUED
    assert engine.promote(ahead)  # as a demand it may go beside the other
    gate.opened.set()
    for one in (demand, ahead):
        engine.wait(one)
    last = engine.submit(ticket(3))  # with no demand left it is copied
    assert last.done.wait(60)
    assert gate.order == [1, 2, 3]
    engine.close()


def test_prefetches_go_by_priority_and_can_be_ranked_anew(link: TransferEngine, gate: Gate) -> None:
    busy(link, gate)
    queued = [ticket(1), ticket(2), ticket(3)]
    for one, priority in zip(queued, (0.2, 0.5, 0.3), strict=True):
        one.priority = priority
        link.submit(one)
    link.rank([(queued[0], 0.4)])
    gate.opened.set()
    for one in queued:
        one.done.wait(60)
    assert gate.order == [99, 2, 1, 3]


def test_what_the_link_has_to_do_is_told_in_seconds(link: TransferEngine, gate: Gate) -> None:
    assert link.copy_s(64) == link.backlog_s() == 0.0  # nothing has been copied yet
    first = busy(link, gate)
    gate.opened.set()
    link.wait(first)
    assert link.take_finished() == [first]
    assert link.copy_s(64) == pytest.approx(first.landed_s - first.started_s)
    assert link.copy_s(16) == pytest.approx(link.copy_s(64) / 4)
    link.pace = Pace(gbps=6.4e-11, latency_us=0.0)  # a thousand seconds for 64 bytes
    assert link.copy_s(64) == pytest.approx(1000.0)
    assert link.submit(ticket(1)).done.wait(60)
    two = link.submit(ticket(2, demand=True))
    assert link.backlog_s() == pytest.approx(2000.0, rel=0.1)
    half = link.submit(ticket(3, demand=True, size=32))
    assert link.backlog_s() == pytest.approx(2500.0, rel=0.1), "by the bytes of each"
    assert link.cancel(two) and link.cancel(half)


def test_the_pace_is_the_published_arithmetic() -> None:
    pace = Pace(gbps=2.0, latency_us=10.0)
    assert pace.duration_s(2_000_000) == pytest.approx(1e-3 + 1e-5)
    assert pace.book(5.0, 2_000_000) == pytest.approx((5.0, 5.00101))
    assert pace.book(5.0005, 2_000_000) == pytest.approx((5.00101, 5.00202))  # waits for the link, not for a thread
    assert pace.book(9.0, 2_000_000)[0] == 9.0


def test_a_paced_copy_is_not_ready_before_the_link_would_deliver_it(link: TransferEngine, gate: Gate) -> None:
    gate.opened.set()
    link.pace = Pace(gbps=1e-6, latency_us=0.0)  # 64 ms for 64 bytes
    one = link.submit(ticket(1))
    one.done.wait(60)
    assert one.landed_s - one.started_s >= 0.064 * (1 - 1e-6)  # later where the thread had no core at that moment
    link.wait(one)
    assert time.perf_counter() >= one.landed_s
    assert link.landed(one)


def test_the_real_link_has_a_speed() -> None:
    assert measure_gbps(CPU, size_bytes=1 << 20, repeats=2) > 0


def test_what_the_host_computed_is_copied_by_who_submits_it_where_waking_a_worker_takes_longer() -> None:
    by = list[threading.Thread]()
    begun, held = threading.Event(), threading.Event()

    def fetch(eid: int, raws: Sequence[torch.Tensor], first: int) -> int:
        by.append(threading.current_thread())
        if eid == 9:
            begun.set()
            assert held.wait(60)
        return 0

    def behind(eid: int) -> Ticket:
        one = ticket(eid, demand=False)
        one.behind = True
        return link.submit(one)

    link, me = TransferEngine(CPU, fetch), threading.current_thread()
    try:
        assert behind(0).done.wait(60) and by[0] is not me, "what a copy takes is not known"
        link._handover_s = 60.0
        assert link.landed(behind(1)) and by[1] is me
        assert link.submit(ticket(2, demand=False)).done.wait(60) and by[2] is not me, "a prefetch is a worker's"
        link.submit(ticket(9, demand=True))
        assert begun.wait(60)
        late = behind(3)
        assert late.state == QUEUED, "it begins when no demand is in flight"
        held.set()
        assert late.done.wait(60) and by[4] is not me
        link._handover_s = 0.0
        assert behind(4).done.wait(60) and by[5] is not me, "a worker makes what takes longer"
    finally:
        held.set()
        link.close()


def test_a_slow_link_that_is_in_use_makes_copies_behind_wait() -> None:
    link = TransferEngine(CPU, lambda eid, raws, first: 0)
    try:
        link.wait(link.submit(ticket(0, demand=True)))
        link.pace, link._handover_s = Pace(0.001, 0.0), 60.0
        first, second = ticket(1, demand=False), ticket(2, demand=False)
        first.behind = second.behind = True
        link.submit(first)
        assert first.state == LANDED and not link.landed(first), "its bytes are there, and the emulated link is busy"
        assert link.submit(second).state == QUEUED and link.cancel(second)
    finally:
        link.close()


@pytest.mark.parametrize("then", ["wait", "wake"])
def test_what_is_waited_for_is_left_where_waking_a_worker_takes_longer_than_the_copy(then: str) -> None:
    by = list[threading.Thread]()

    def fetch(eid: int, raws: Sequence[torch.Tensor], first: int) -> int:
        by.append(threading.current_thread())
        return 0

    link, me = TransferEngine(CPU, fetch), threading.current_thread()
    try:
        link.wait(link.submit(ticket(0, demand=True)))  # from then on what a copy takes is known
        link._handover_s = 60.0
        one = ticket(1, demand=True)
        one.waited = True
        assert link.submit(one).state == QUEUED and len(by) == 1
        getattr(link, then)(*[one] if then == "wait" else [])
        assert one.done.wait(60) and (by[1] is me) == (then == "wait")
        link._handover_s = 0.0
        other = ticket(2, demand=True)
        other.waited = True
        assert link.submit(other).done.wait(60) and by[2] is not me, "a worker makes what takes longer"
    finally:
        link.close()
