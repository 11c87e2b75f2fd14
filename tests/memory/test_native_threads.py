"""Threads that share steps: every unit once, the same bits from any number of them; and memory fenced in."""

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

from core.memory.codec.base import Base
from core.memory.codec.fast import dequantize
from core.memory.codec.fast.dequantize import dequantized
from core.memory.codec.fast.products import CanonicalProducts
from core.memory.codec.fast.steps import ALONE, Steps, Work
from core.memory.codec.matrix import matrix
from core.memory.codec.measure import fill
from core.memory.codec.native.threads import TORCHS, Team, _team, acquire_team, share, shared_by
from core.system.native.compile import supported
from core.system.native.contention import LOOK_S, watch
from core.system.native.openmp import entry
from tests.memory.test_codec import make
from tests.selection import examples, layered
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
CALL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
FP16 = torch.float16


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
        self.threads: set[int] = set()
        self._together, self._came = together, threading.Condition()
        self._code = CALL(self._compute)
        self.address = ctypes.cast(self._code, ctypes.c_void_p).value or 0

    def _compute(self, *given: int) -> None:
        self.calls.append(given)
        with self._came:
            self.threads.add(threading.get_ident())
            self._came.notify_all()
            self._came.wait_for(lambda: len(self.threads) >= self._together, 0.2)


def run(team: Team, *works: Work) -> None:
    steps = Steps()
    steps.extend(works)
    steps.run(team)


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(alone=False)


@examples(60)
@given(
    threads=st.sampled_from([TORCHS, 1, 2, 3]),
    units=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=4),
)
def test_every_unit_of_every_step_is_computed_once_and_in_order(
    team: Team, threads: int, units: list[tuple[int, int]]
) -> None:
    share(threads)
    kernels = [Kernel() for _ in units]
    run(team, *[Work(one.address, (7,), count, some) for one, (count, some) in zip(kernels, units, strict=True)])
    for kernel, (count, some) in zip(kernels, units, strict=True):
        assert all(last - first <= some for _, first, last in kernel.calls) or kernel.calls[0][1:] == (0, count)
        assert sorted(row for _, first, last in kernel.calls for row in range(first, last)) == [*range(count)]
        if threads == 1 or some >= count:
            assert (len(kernel.calls), kernel.threads) == (1, {threading.get_ident()})


@pytest.mark.skipif(not entry(), reason="torch has another OpenMP")
def test_torch_s_threads_take_part() -> None:
    team, until = Team(alone=False), time.monotonic() + 30
    with torch_threads(2):
        share(TORCHS)
        kernel = Kernel()
        while len(kernel.threads) < 2:
            kernel = Kernel(together=2)
            run(team, Work(kernel.address, (), 4, 1))
            assert time.monotonic() < until
    assert not team._helpers, "none of ours is woken"


def test_a_helper_that_fell_asleep_is_woken() -> None:
    """If not for one product, then for the next: on a busy machine it may sleep again before there is work."""
    team, until = Team(alone=False), time.monotonic() + 30
    for threads in (2, 3, 2):
        share(threads)
        time.sleep(0.02)  # longer than they watch
        kernel = Kernel()
        while len(kernel.threads) < threads:
            kernel = Kernel(together=threads)
            run(team, Work(kernel.address, (), 4, 1))
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

    called, code = ctypes.CFUNCTYPE(ctypes.c_int)(give_up), CALL(compute)
    monkeypatch.setattr("core.memory.codec.native.threads.give_up", lambda: ctypes.cast(called, ctypes.c_void_p).value)
    share(2)
    team = Team(alone=False)
    kernel = ctypes.cast(code, ctypes.c_void_p).value or 0
    for _ in range(10):  # on a busy machine the helper may sleep again before there is anything to share
        both.reset()
        run(team, Work(kernel, (), 2, 1))
        if caller in gave_up:
            break
    assert caller in gave_up
    deadline = time.monotonic() + 5
    while gave_up == {caller} and time.monotonic() < deadline:  # a helper that sleeps by now is woken, and waits again
        run(team, Work(kernel, (), 1, 1))
        time.sleep(0.001)
    assert len(gave_up) == 2


def test_memory_is_its_owners_and_zeros_at_first() -> None:
    team = Team(alone=True)
    one, two = team.memory("one", 100), team.memory("two", 100)
    assert one % 64 == two % 64 == 0 and abs(one - two) >= 100
    ctypes.memset(one, 255, 100)
    assert team.memory("one", 64) == one
    assert ctypes.string_at(team.memory("two", 100), 100) == bytes(100)
    assert ctypes.string_at(team.memory("one", 5000), 5000) == bytes(5000)


class Products:
    def __init__(self, name: str, outputs: int, inputs: int) -> None:
        parts = {"down_proj": torch.randn(outputs, inputs)}
        codec = make(name, parts, FP16)
        assert isinstance(codec, Base)
        self.slot, self.matrix = fill(codec, parts), matrix(codec, "down_proj")
        self.few, self.tiled = (CanonicalProducts(self.matrix, FP16, tiled=rows) for rows in (99, 1))
        self.x = torch.randn(6, inputs).half()


@pytest.fixture(scope="module")
def large() -> Products:
    """512 kB of codes: more than one thread takes."""
    return Products("int4-g64", 1024, 1024)


def every(made: Products) -> list[torch.Tensor]:
    at, x = made.slot.at, made.x
    return [made.few.few([at], x[:1]), made.few.many(at, x), made.tiled.many(at, x), dequantized(made.matrix, at, FP16)]


def test_the_number_of_threads_changes_no_bit(large: Products) -> None:
    share(1)
    want = every(large)
    for threads in (1, 2, 3, TORCHS):
        share(threads)
        for _ in range(20 if threads == 3 else 60):  # three threads take turns on two cores
            assert all(map(torch.equal, every(large), want))


def test_whoever_comes_second_has_a_team_of_its_own(large: Products) -> None:
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
        return torch.frombuffer((ctypes.c_char * self.size).from_address(self.at), dtype=FP16).view(shape)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected with mprotect")
@pytest.mark.parametrize("name", layered(["int8", "int4-g32", "mxfp4", "int3"], quick=lambda name: name == "int4-g32"))
def test_nothing_outside_of_what_is_given_is_read_or_written(name: str) -> None:
    """Whoever touches a page beside a tensor ends: a child. Asking for bytes ahead does not count as touching."""
    made, fields = Products(name, 16, 192), ("codes", "high", "scale", "zero")
    tensors = *made.slot.weights["down_proj"], made.x
    for at_end in (True, False):
        fences = [Fenced(t.nbytes, at_end) for t in tensors]
        for fence, t in zip(fences, tensors, strict=True):
            ctypes.memmove(fence.at, t.data_ptr(), fence.size)
        x, base = fences.pop(), fences[0].at
        parts = [part for part in fields if getattr(made.matrix, part) is not None]
        moved = {
            n: getattr(made.matrix, n)._replace(at=fence.at - base) for n, fence in zip(parts, fences, strict=True)
        }
        form = made.matrix._replace(**moved)
        ways = [CanonicalProducts(form, FP16, tiled=rows) for rows in (99, 1)]
        prepared, out, wide = (
            Fenced(6 * ways[0].prepared_bytes, at_end),
            Fenced(6 * 16 * 2, at_end),
            Fenced(6144, at_end),
        )
        runs = list[Steps]()
        for way in ways:
            runs.append(steps := Steps())
            steps.add(way.prepare(x.at, 192 * 2, 6, prepared.at))
            steps.add(way.multiply(steps, [*way.given(prepared.at, [6], out.at, 16 * 2)], [base], FP16))
        runs.append(steps := Steps())
        steps.add(Work(dequantize._kernel(form, FP16), (base, wide.at), 16, ALONE))
        child = os.fork()
        if not child:
            team = Team(alone=True)
            for steps in runs:
                steps.run(team)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(out.view(6, 16), made.few.many(made.slot.at, made.x))
        assert torch.equal(wide.view(16, 192), dequantized(made.matrix, made.slot.at, FP16))
