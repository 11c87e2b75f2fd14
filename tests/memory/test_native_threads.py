"""Threads that share a product: every row once, the same bits from any number of them; and memory fenced in."""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec.native.products import STATES, Kernels
from core.memory.codec.native.threads import MOST, TORCHS, WORTH_IT, Team, _team, acquire_team, share, shared_by
from core.system.native.compile import widths
from core.system.native.contention import LOOK_S, watch
from core.system.native.openmp import entry
from tests.memory.test_native import Case, case, states
from tests.selection import examples, layered

pytestmark = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")
CALL = {n: ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n) for n in (2, 5)}
FP16, FIELDS = torch.float16, ("codes", "high", "scale", "zero")


@pytest.fixture(autouse=True)
def shared_as_before() -> Iterator[None]:
    """Whatever else runs on this machine: a watch that finds other programs would have one thread compute alone."""
    before, watch.enabled = shared_by(), False
    while watch.look():
        time.sleep(LOOK_S)
    yield
    watch.enabled = True
    share(before)


class Kernel:
    """Writes down what it was called with and by whom; whoever comes first waits a while for `together` of them."""

    def __init__(self, together: int = 1) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.prepared: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self._together, self._came = together, threading.Condition()
        self._code = CALL[5](self._compute), CALL[2](lambda x, into: self.prepared.append((x, into)))
        self.compute, self.prepare = (ctypes.cast(code, ctypes.c_void_p).value or 0 for code in self._code)

    def _compute(self, *given: int) -> None:
        self.calls.append(given)
        with self._came:
            self.threads.add(threading.get_ident())
            self._came.notify_all()
            self._came.wait_for(lambda: len(self.threads) >= self._together, 0.2)


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(alone=False)


@examples(60)
@given(
    threads=st.sampled_from([TORCHS, 1, 2, 3]),
    slots=st.lists(st.integers(1, 1 << 62), min_size=1, max_size=4),
    pairs=st.integers(1, 300),
    row_bytes=st.sampled_from([16, 1056, 40000]),
    laid_out=st.integers(0, 3),
)
def test_every_row_is_computed_once(
    team: Team, threads: int, slots: list[int], pairs: int, row_bytes: int, laid_out: int
) -> None:
    share(threads)
    kernel, rows = Kernel(), 2 * pairs
    team.run(slots, rows, row_bytes, kernel.compute, 1000, 64, 5000, 600, kernel.prepare, 7000, 48, laid_out, 128)
    assert kernel.prepared == [(7000 + i * 48, 1000 + i * 128) for i in range(laid_out)]
    assert all(first % 2 == end % 2 == 0 for *_, first, end in kernel.calls)
    assert sorted((*places, row) for *places, first, end in kernel.calls for row in range(first, end)) == sorted(
        (1000 + i * 64, slot, 5000 + i * 600, row) for i, slot in enumerate(slots) for row in range(rows)
    )
    if threads == 1 or (threads == TORCHS and not entry()) or len(slots) * rows * row_bytes < WORTH_IT:
        assert (len(kernel.calls), kernel.threads) == (len(slots), {threading.get_ident()})


def test_a_helper_that_fell_asleep_is_woken() -> None:
    """If not for one product, then for the next: on a busy machine it may sleep again before there is work."""
    team, until = Team(alone=False), time.monotonic() + 30
    for threads in (2, 3, 2):
        share(threads)
        time.sleep(0.02)  # longer than they watch
        kernel = Kernel()
        while len(kernel.threads) < threads:
            kernel = Kernel(together=threads)
            team.run([0] * 4, 2, WORTH_IT, kernel.compute, 0, 0, 0, 0)
            assert len(kernel.calls) == 4 and threading.get_ident() in kernel.threads
            assert time.monotonic() < until
    assert len(team._helpers) == 2


def test_a_call_that_comes_while_a_helper_gives_up_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its last look and its sleep a helper waits for Python's lock, which the caller has."""
    team, helped = Team(alone=False), threading.Semaphore(0)
    rounds = iter(range(10))

    def help_once(job: int, patience: int) -> None:
        if next(rounds) == 0:
            team._wake(1)
        helped.release()

    monkeypatch.setattr(team, "_help", help_once)
    team._wake(1)
    assert all(helped.acquire(timeout=20) for _ in range(2))
    team.close()


def test_a_thread_that_waits_gives_its_processor_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller for a helper that still computes, and the helper for what is shared next."""
    gave_up, caller, both = set[int](), threading.get_ident(), threading.Barrier(2)

    def give_up() -> int:
        gave_up.add(threading.get_ident())
        return 0

    def compute(*given: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        if threading.get_ident() != caller:
            deadline = time.monotonic() + 5
            while caller not in gave_up and time.monotonic() < deadline:
                time.sleep(0.001)

    called, code = ctypes.CFUNCTYPE(ctypes.c_int)(give_up), CALL[5](compute)
    monkeypatch.setattr("core.memory.codec.native.threads.give_up", lambda: ctypes.cast(called, ctypes.c_void_p).value)
    share(2)
    team = Team(alone=False)
    kernel = ctypes.cast(code, ctypes.c_void_p).value or 0
    for _ in range(10):  # on a busy machine the helper may sleep again before there is anything to share
        both.reset()
        team.run([1, 2], 4, WORTH_IT, kernel, 0, 0, 0, 0, unit=4)
        if caller in gave_up:
            break
    assert caller in gave_up
    deadline = time.monotonic() + 5
    while gave_up == {caller} and time.monotonic() < deadline:  # a helper that sleeps by now is woken, and waits again
        team.run([1], 4, 16, kernel, 0, 0, 0, 0)
        team.run_steps(0, 0, 0)
        time.sleep(0.001)
    assert len(gave_up) == 2


def test_as_many_products_as_there_is_place_for() -> None:
    team, kernel = Team(alone=True), Kernel()
    team.run(range(MOST), 2, 16, kernel.compute, 0, 0, 0, 0)
    assert [slot for _, slot, *_ in kernel.calls] == list(range(MOST))
    with pytest.raises(ValueError, match="size"):
        team.run(range(MOST + 1), 2, 16, kernel.compute, 0, 0, 0, 0)


def test_memory_is_its_owners_and_zeros_at_first() -> None:
    team = Team(alone=True)
    one, two = team.memory("one", 100), team.memory("two", 100)
    assert one % 64 == two % 64 == 0 and abs(one - two) >= 100
    ctypes.memset(one, 255, 100)
    assert team.memory("one", 64) == one
    assert ctypes.string_at(team.memory("two", 100), 100) == bytes(100)
    assert ctypes.string_at(team.memory("one", 5000), 5000) == bytes(5000)


@pytest.fixture(scope="module")
def large() -> Case:
    """512 kB of codes: more than one thread takes."""
    made = case("int4-g64", 1024, 1024, torch.bfloat16, 0)
    assert made.products.matrix.outputs * 512 >= 2 * WORTH_IT
    return made


def every(made: Case) -> list[torch.Tensor]:
    """All that a matrix computes."""
    x = states(6, 1024, torch.bfloat16)
    return [
        made.products.few(made.at, x[:1]),
        made.products.few(made.at, x[:2]),
        made.products.few(made.at[:1], x[:1]),
        made.products.many(made.at[0], x),
        made.products.dequantized(made.at[1]),
    ]


def test_the_number_of_threads_changes_no_bit(large: Case) -> None:
    share(1)
    want = every(large)
    for threads in (1, 2, 3):
        share(threads)
        for _ in range(20 if threads == 3 else 60):  # three threads take turns on two cores
            assert all(map(torch.equal, every(large), want))


def test_whoever_comes_second_has_a_team_of_its_own(large: Case) -> None:
    share(1)
    want = every(large)
    share(2)
    with ThreadPoolExecutor(2) as pool:
        taken = acquire_team()
        try:
            assert taken is _team() and not taken._alone
            own = pool.submit(acquire_team).result(60)
            assert own._alone
            own.release()
            assert all(map(torch.equal, pool.submit(every, large).result(60), want))
        finally:
            taken.release()
        again = [pool.submit(lambda: [every(large) for _ in range(30)]) for _ in range(2)]
        assert all(all(map(torch.equal, got, want)) for future in again for got in future.result(60))
    assert acquire_team() is taken
    taken.release()


class Fenced:
    """Bytes between two pages that nobody may touch, at the end of what lies between them or at its start."""

    def __init__(self, size: int, at_end: bool) -> None:
        page, self.size = mmap.PAGESIZE, size
        whole = -(-size // page) * page
        self._map = mmap.mmap(-1, whole + 2 * page)  # shared with a child
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        assert protect(start, page, 0) == protect(start + page + whole, page, 0) == 0
        self.at = start + page + (whole - size if at_end else 0)

    def view(self, *shape: int) -> torch.Tensor:
        """As fp16."""
        return torch.frombuffer((ctypes.c_char * self.size).from_address(self.at), dtype=FP16).view(shape)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected with mprotect")
@pytest.mark.parametrize("name", layered(["int8", "int4-g32", "mxfp4", "int3"], quick=lambda name: name == "int4-g32"))
def test_nothing_outside_of_what_is_given_is_read_or_written(name: str) -> None:
    """Whoever touches a page beside a tensor ends: a child. Asking for bytes ahead does not count as touching."""
    for width, at_end in ((width, at_end) for width in widths() for at_end in (True, False)):
        made = case(name, 2, 192, FP16, width)
        slot, x = made.slots[0], states(4, 192, FP16)
        tensors = *slot.weights["down_proj"], x
        fences = [Fenced(t.nbytes, at_end) for t in tensors]
        for fence, t in zip(fences, tensors, strict=True):
            ctypes.memmove(fence.at, t.data_ptr(), fence.size)
        form, given, base = made.products.matrix, fences.pop(), fences[0].at
        parts = [part for part in FIELDS if getattr(form, part) is not None]
        moved = {n: getattr(form, n)._replace(at=fence.at - base) for n, fence in zip(parts, fences, strict=True)}
        kernels = Kernels(form._replace(**moved), FP16, width)
        laid_out, one, some, wide = (Fenced(size, at_end) for size in (4 * kernels.layout.bytes, 4, 16, 2 * 192 * 2))
        called = (kernels.one, one), (kernels.many(STATES), some), (kernels.dequantize, wide)
        child = os.fork()
        if not child:
            for i in range(4):
                CALL[2](kernels.prepare)(given.at + i * 192 * 2, laid_out.at + i * kernels.layout.bytes)
            for kernel, out in called:
                CALL[5](kernel)(laid_out.at, base, out.at, 0, 2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(some.view(4, 2), made.products.many(slot.at, x))
        assert torch.equal(one.view(1, 2), made.products.few([slot.at], x[:1]))
        assert torch.equal(wide.view(2, 192), made.products.dequantized(slot.at))
