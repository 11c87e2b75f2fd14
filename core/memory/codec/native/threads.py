"""Several threads that share the rows of one product, each taking a few at a time.

A product takes microseconds, less than waking a thread. So helper threads spin for a while after each product, in
native code and without the GIL, and sleep when none follows. The caller never waits for a sleeping helper: it computes
the remaining rows itself, and all of them where other programs want the processors (`core.system.native.contention`).
In a prompt, where torch's operations come between, its own threads share them (`core.system.native.openmp`). Results do
not depend on which thread computes a row.
"""

import ctypes
import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import Self

import torch

from core.memory.codec.native.team_code import FIELDS, FORM, GIVE_UP, LINE, SPENT, functions
from core.system.native import openmp
from core.system.native.compile import address
from core.system.native.contention import watch

PATIENCE = 1_000_000  # CPU clock ticks: about 0.4 ms, more than the gap between two products
WORTH_IT = 128 << 10  # bytes of weights: below this, other threads would join too late
PART = 32 << 10  # bytes of weights per unit of work
MULTIPLE = 4  # rows that a unit has a multiple of
MOST = 4096  # products per call
TORCHS = 0  # in place of a number of threads: those of torch


class Team:
    """Helper threads and memory of a caller. A thread claims the team, computes one product after another, and releases
    it."""

    def __init__(self, alone: bool) -> None:
        made = functions()
        self._run, self._spread, self._help = made["run"], made["spread"], made["help"]
        self._sequence, self._step = made["sequence"], address(made["step"])
        self._alone, self._lock, self._closing = alone, threading.Lock(), False
        self._job = (ctypes.c_char * (LINE + FIELDS + FORM.size))()
        self._job_at = -(-ctypes.addressof(self._job) // LINE) * LINE
        self._fields_at = self._job_at - ctypes.addressof(self._job) + FIELDS
        ctypes.c_int64.from_address(self._job_at + GIVE_UP).value = give_up()
        self.spent = ctypes.c_int64.from_address(self._job_at + SPENT)
        """Ticks that its callers' steps have taken."""
        self._pack = FORM.pack_into
        self._slots = (ctypes.c_int64 * MOST)()
        self._slots_at = ctypes.addressof(self._slots)
        self._memory: dict[object, tuple[int, int, object]] = {}  # address, bytes, owning object
        self._helpers: list[threading.Event] = []

    def memory(self, owner: object, size: int) -> int:
        """The address of `size` bytes for one owner, valid until the release. Zeroed where nothing was written for that
        owner before."""
        kept = self._memory.get(owner)
        if kept is None or kept[1] < size:
            whole = (ctypes.c_char * (size + LINE))()
            kept = self._memory[owner] = -(-ctypes.addressof(whole) // LINE) * LINE, size, whole
        return kept[0]

    def run(
        self,
        slots: Sequence[int],
        outputs: int,
        row_bytes: int,
        kernel: int,
        states: int,
        stride: int,
        out: int,
        out_stride: int,
        prepare: int = 0,
        x: int = 0,
        x_stride: int = 0,
        given: int = 0,
        state_bytes: int = 0,
        unit: int = 0,
    ) -> None:
        """Call kernel(states + i * stride, slots[i], out + i * out_stride, from, to) for every i and all rows, of
        `row_bytes` bytes of codes; before it prepare(x + i * x_stride, states + i * state_bytes) for `given` states.
        Strides are in bytes; arguments without another meaning are addresses. At most MOST slots. `unit`: rows that a
        thread takes at a time, 0 = by their bytes."""
        count, parallel = len(slots), openmp.entry() if _used == TORCHS else 0
        threads = torch.get_num_threads() if parallel else 1 if watch.look() else _used
        self._slots[:count] = slots  # type: ignore[call-overload]  # any sequence will do
        if threads > 1 and not self._alone and count * outputs * row_bytes >= WORTH_IT:
            rows = unit or min(max(MULTIPLE, PART // row_bytes & -MULTIPLE), outputs)
            parts = -(-outputs // rows)
            if not parallel:
                self._wake(threads - 1)
        else:
            parallel = 0
            rows, parts, threads = outputs, 1, 0
        self._pack(
            self._job,
            self._fields_at,
            count * parts,
            parts,
            rows,
            outputs,
            kernel,
            states,
            stride,
            self._slots_at,
            out,
            out_stride,
            threads,
            prepare,
            x,
            x_stride,
            given,
            state_bytes,
            parallel,
        )
        (self._spread if parallel else self._run)(self._job_at)

    def run_steps(self, stop: int, steps: int, count: int) -> None:
        """Compute `count` steps, STEPs at an address, one after the other. `stop`: the address of a 0, where a step may
        write that it is the last; then it is the number of those that were computed."""
        threads = 1 if self._alone or watch.look() else max(1, _used - _lent)
        self._sequence(self.begin_steps(threads - 1, threads - 1), stop, steps, count)

    def begin_steps(self, shared: int, helpers: int) -> int:
        """Steps are computed next, which threads share where `shared` > 0; wakes so many helpers -> the address of what
        they share."""
        if helpers > 0:
            self._wake(helpers)
        self._slots[0] = 0
        job = (0, 1, 1, 1, self._step, 0, 0, self._slots_at, 0, 0, shared, 0, 0, 0, 0, 0, 0)
        self._pack(self._job, self._fields_at, *job)
        return self._job_at

    def close(self) -> None:
        """End the helpers. Nothing may be computed."""
        self._closing = True
        for called in self._helpers:
            called.set()

    def _wake(self, helpers: int) -> None:
        while len(self._helpers) < helpers:
            called = threading.Event()
            self._helpers.append(called)
            threading.Thread(target=self._work, args=(called,), name="moestro-rows", daemon=True).start()
        for called in self._helpers[:helpers]:
            if not called.is_set():
                called.set()

    def _work(self, called: threading.Event) -> None:
        watch.helping()
        while True:
            called.wait()
            called.clear()  # before it helps: a call that comes while it gives up is not lost
            if self._closing:
                return
            self._help(self._job_at, PATIENCE)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        """Acquired by `acquire_team`; released at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


_used = 1


def share(threads: int) -> None:
    """Set the number of threads that share each product, for all callers; TORCHS: as many as torch has, and the very
    same where they can be had, else one."""
    global _used
    _used = threads


def shared_by() -> int:
    """What `share` has set."""
    return _used


_lent = 0


def lend(threads: int) -> None:
    """So many of them leave their processors to threads that compute in the background, in steps of one call."""
    global _lent
    _lent = threads


class _Own(threading.local):
    team: Team | None = None


_own = _Own()


def acquire_team() -> Team:
    """The team with helpers; while another thread holds it, the calling thread's own team, which has no helpers."""
    team = _team()
    if team._lock.acquire(blocking=False):
        return team
    if _own.team is None:
        _own.team = Team(alone=True)
    _own.team._lock.acquire()
    return _own.team


class Ticks:
    """Converts the clock ticks of native code to seconds: by the last STRETCH_S or more, or all the time so far."""

    STRETCH_S = 10.0

    def __init__(self) -> None:
        self._read, self._ticks = functions()["clock"], ctypes.c_int64()
        self._since, self._span_s, self._tick_s = self._look(), 0.0, 0.0

    def _look(self) -> tuple[float, int]:
        self._read(ctypes.addressof(self._ticks))
        return time.perf_counter(), self._ticks.value

    def tick_s(self) -> float:
        """Seconds of a tick."""
        begun_s, ticks = self._since
        if time.perf_counter() - begun_s >= min(2 * self._span_s, self.STRETCH_S):
            now = self._look()
            self._span_s = now[0] - begun_s
            self._tick_s = self._span_s / max(1, now[1] - ticks)
            if self._span_s >= self.STRETCH_S:
                self._since, self._span_s = now, self.STRETCH_S / 2
        return self._tick_s


ticks = functools.cache(Ticks)


def steps_ticks() -> int:
    """Ticks that steps of the calling thread have taken: native code, without the Python around it. Those of other
    threads count, too, while they had the team with helpers."""
    spent, own = _team().spent.value, _own.team
    return spent if own is None else spent + own.spent.value


@functools.cache
def give_up() -> int:
    """The address of what the system has for a thread that lets others have its processor: a function int()."""
    library, name = ("kernel32", "SwitchToThread") if os.name == "nt" else (None, "sched_yield")
    return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0


@functools.cache
def _team() -> Team:
    return Team(alone=False)
