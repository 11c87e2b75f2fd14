"""Several threads that share the units of a step, each taking a few at a time.

A step takes microseconds, less than waking a thread. So helper threads spin for a while after each one, in native code
and without the GIL, and sleep when none follows. The caller never waits for a sleeping helper: it computes the rest
itself, and all of it where other programs want the processors (`core.system.native.contention`). In a prompt, where
torch's operations come between, its own threads share steps (`core.system.native.openmp`). Results do not depend on
which thread computes a unit.
"""

import ctypes
import functools
import os
import threading
import time
from typing import Self

import torch

from core.memory.codec.native.team_code import FIELDS, FORM, GIVE_UP, LINE, SPENT, functions
from core.system.native import openmp
from core.system.native.contention import watch

PATIENCE = 1_000_000  # CPU clock ticks: about 0.4 ms, more than the gap between two runs of steps
WORTH_IT = 128 << 10  # bytes of weights: below this, other threads would join too late
PART = 32 << 10  # bytes of weights that a thread takes at a time, at least
TORCHS = 0  # in place of a number of threads: those of torch


class Team:
    """Helper threads and memory of a caller. A thread claims the team, computes runs of steps, and releases it."""

    def __init__(self, alone: bool) -> None:
        made = functions()
        self._help, self._sequence = made["help"], made["sequence"]
        self._alone, self._lock, self._closing = alone, threading.Lock(), False
        self._job = (ctypes.c_char * (LINE + FIELDS + FORM.size))()
        self._job_at = -(-ctypes.addressof(self._job) // LINE) * LINE
        self._fields_at = self._job_at - ctypes.addressof(self._job) + FIELDS
        ctypes.c_int64.from_address(self._job_at + GIVE_UP).value = give_up()
        self.spent = ctypes.c_int64.from_address(self._job_at + SPENT)
        """Ticks that its callers' steps have taken."""
        self.patience = PATIENCE  # ticks after which helpers sleep
        self._pack = FORM.pack_into
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

    def run_steps(self, stop: int, steps: int, count: int) -> None:
        """Compute `count` steps, STEPs at an address, one after the other. `stop`: the address of a 0, where a step may
        write that it is the last; then it is the number of those that were computed."""
        parallel = openmp.entry() if _used == TORCHS and not self._alone else 0
        if parallel:
            self._sequence(self.begin_steps(torch.get_num_threads() - 1, 0, parallel), stop, steps, count)
            return
        wanted = _used if _used != TORCHS else torch.get_num_threads()
        threads = 1 if self._alone or watch.look() else max(1, wanted - _lent)
        self._sequence(self.begin_steps(threads - 1, threads - 1), stop, steps, count)

    def begin_steps(self, shared: int, helpers: int, parallel: int = 0) -> int:
        """Steps are computed next, which so many threads share with the caller; wakes `helpers` -> the address of what
        they share. `parallel`: the address of what starts torch's threads in place of ours."""
        if helpers > 0:
            self._wake(helpers)
        self._pack(self._job, self._fields_at, 0, 0, 0, 0, 0, shared, parallel)
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
            self._help(self._job_at, self.patience)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        """Acquired by `acquire_team`; released at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


_used = 1


def share(threads: int) -> None:
    """Set the number of threads that share each step, for all callers; TORCHS: as many as torch has, and the very
    same where they can be had."""
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
