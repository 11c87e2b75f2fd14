"""Several threads that share the rows of one product, each taking a few at a time.

A product takes microseconds, less than waking a thread. So helper threads spin for a while after each product, in
native code and without the GIL, and sleep when none follows. The caller never waits for a sleeping helper: it computes
the remaining rows itself, and all of them where other programs want the processors (`core.system.native.contention`).
In a prompt, where torch's operations come between, its own threads share them (`core.system.native.openmp`). Results do
not depend on which thread computes a row.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence

import torch

from core.system.native import openmp
from core.system.native.compile import Function, address, compiled
from core.system.native.contention import watch
from core.system.native.ir import Code

LINE = 64  # bytes: fields written by different threads lie in different cache lines
NEXT, OPEN, INSIDE, FIELDS = (LINE * i for i in range(4))
NAMES = (
    "units",
    "parts",
    "rows",
    "outputs",
    "kernel",
    "states",
    "stride",
    "slots",
    "out",
    "out_stride",
    "shared",
    "prepare",
    "x",
    "x_stride",
    "given",
    "state_bytes",
    "parallel",
)
FORM = struct.Struct(f"{len(NAMES)}q")
PATIENCE = 1_000_000  # CPU clock ticks: about 0.4 ms, more than the gap between two products
WORTH_IT = 128 << 10  # bytes of weights: below this, other threads would join too late
PART = 32 << 10  # bytes of weights per unit of work
MULTIPLE = 4  # rows that a unit has a multiple of
MOST = 4096  # products per call
TORCHS = 0  # in place of a number of threads: those of torch


def _field(code: Code, name: str, kind: str = "i64") -> str:
    return code.load(kind, code.at("%job", FIELDS + NAMES.index(name) * 8), 8)


def _atomic(code: Code, operation: str, place: int, value: int) -> str:
    return code.let(f"atomicrmw {operation} ptr {code.at('%job', place)}, i64 {value} seq_cst, align 8")


def _look(code: Code, place: int) -> str:
    return code.let(f"load atomic i64, ptr {code.at('%job', place)} seq_cst, align 8")


def _drain() -> Code:
    """Generates @drain(job): compute units until none is left. A unit is a range of rows of one product."""
    code = Code("void @drain(ptr %job)")
    units, parts, rows, outputs = (_field(code, name) for name in ("units", "parts", "rows", "outputs"))
    kernel, states, slots, out = (_field(code, name, "ptr") for name in ("kernel", "states", "slots", "out"))
    stride, out_stride = _field(code, "stride"), _field(code, "out_stride")
    code.do("br label %take")
    code.begin("take")
    unit = _atomic(code, "add", NEXT, 1)
    code.do(f"br i1 {code.let(f'icmp slt i64 {unit}, {units}')}, label %compute, label %over")
    code.begin("compute")
    one, part = code.let(f"udiv i64 {unit}, {parts}"), code.let(f"urem i64 {unit}, {parts}")
    first = code.times(part, rows)
    last = code.call("i64", "llvm.smin.i64", ("i64", code.add(first, rows)), ("i64", outputs))
    slot = code.load("ptr", code.at(slots, one, 8), 8)
    code.do(
        f"call void {kernel}(ptr {code.at(states, code.times(one, stride))}, ptr {slot}, "
        f"ptr {code.at(out, code.times(one, out_stride))}, i64 {first}, i64 {last})"
    )
    code.do("br label %take")
    code.begin("over")
    return code


def _begin(code: Code) -> None:
    """Prepare the given states; no unit is taken."""
    prepare, x, states = (_field(code, name, "ptr") for name in ("prepare", "x", "states"))
    x_stride, state_bytes = _field(code, "x_stride"), _field(code, "state_bytes")
    with code.loop(0, _field(code, "given")) as each:
        code.do(
            f"call void {prepare}(ptr {code.at(x, code.times(each.index, x_stride))}, "
            f"ptr {code.at(states, code.times(each.index, state_bytes))})"
        )
    code.do(f"store atomic i64 0, ptr {code.at('%job', NEXT)} seq_cst, align 8")


def _spread() -> Code:
    """Generates @spread(job): as @run, together with torch's threads."""
    code = Code("void @spread(ptr %job)")
    _begin(code)
    threads = code.let(f"trunc i64 {_field(code, 'shared')} to i32")
    code.do(f"call void {_field(code, 'parallel', 'ptr')}(ptr @drain, ptr %job, i32 {threads}, i32 0)")
    return code


def _run() -> Code:
    """Generates @run(job): prepare the given states, then compute all units, together with the helpers."""
    code = Code("void @run(ptr %job)")
    _begin(code)
    code.do(f"store atomic i64 {_field(code, 'shared')}, ptr {code.at('%job', OPEN)} seq_cst, align 8")
    code.do("call void @drain(ptr %job)")
    code.do(f"store atomic i64 0, ptr {code.at('%job', OPEN)} seq_cst, align 8")
    code.do("br label %left")
    code.begin("left")  # wait for helpers inside: they compute, or read fields
    code.run("llvm.x86.sse2.pause")
    code.do(f"br i1 {code.let(f'icmp eq i64 {_look(code, INSIDE)}, 0')}, label %over, label %left")
    code.begin("over")
    return code


def _help() -> Code:
    """Generates @help(job, patience): take part in products until none was open for `patience` ticks."""
    code = Code("void @help(ptr %job, i64 %patience)")
    code.do("br label %fresh")
    code.begin("fresh")
    began = code.call("i64", "llvm.readcyclecounter")
    code.do("br label %watch")
    code.begin("watch")
    code.run("llvm.x86.sse2.pause")
    code.do(f"br i1 {code.let(f'icmp ne i64 {_look(code, OPEN)}, 0')}, label %enter, label %wait")
    code.begin("enter")  # the caller waits for helpers inside, so
    _atomic(code, "add", INSIDE, 1)  # check again after the caller can see this helper
    code.do(f"br i1 {code.let(f'icmp ne i64 {_look(code, OPEN)}, 0')}, label %join, label %leave")
    code.begin("join")
    code.do("call void @drain(ptr %job)")
    code.do("br label %leave")
    code.begin("leave")
    _atomic(code, "sub", INSIDE, 1)
    code.do("br label %fresh")
    code.begin("wait")
    passed = code.let(f"sub i64 {code.call('i64', 'llvm.readcyclecounter')}, {began}")
    code.do(f"br i1 {code.let(f'icmp slt i64 {passed}, %patience')}, label %watch, label %over")
    code.begin("over")
    return code


STEP = struct.Struct("4q")  # address of a kernel (arguments, from, to), its arguments, units, and units at a time


def _step() -> Code:
    """Generates @step(step, slot, nothing, from, to): some units of a step."""
    code = Code("void @step(ptr %step, ptr %slot, ptr %nothing, i64 %from, i64 %to)")
    kernel, arguments = (code.load("ptr", code.at("%step", 8 * i), 8) for i in range(2))
    code.do(f"call void {kernel}(ptr {arguments}, i64 %from, i64 %to)")
    return code


def _sequence() -> Code:
    """Generates @sequence(job, steps, count): one step after the other. Those of one part are computed at once, others
    together with the helpers."""
    code = Code("void @sequence(ptr %job, ptr %steps, i64 %count)")
    shared = code.let(f"icmp sgt i64 {_field(code, 'shared')}, 0")
    with code.loop(0, "%count") as each:
        step = code.at("%steps", each.index, STEP.size)
        kernel, arguments = (code.load("ptr", code.at(step, 8 * i), 8) for i in range(2))
        units, some = (code.load("i64", code.at(step, 8 * i), 8) for i in range(2, 4))
        many = code.let(f"icmp slt i64 {some}, {units}")
        label = f"step{len(code.text())}"
        code.do(f"br i1 {code.let(f'and i1 {many}, {shared}')}, label %{label}.shared, label %{label}.alone")
        code.begin(f"{label}.alone")
        code.do(f"call void {kernel}(ptr {arguments}, i64 0, i64 {units})")
        code.do(f"br label %{label}.over")
        code.begin(f"{label}.shared")
        parts = code.let(f"udiv i64 {code.add(units, code.let(f'sub i64 {some}, 1'))}, {some}")
        for name, value in (("units", parts), ("parts", parts), ("rows", some), ("outputs", units), ("given", "0")):
            code.store("i64", value, code.at("%job", FIELDS + NAMES.index(name) * 8), 8)
        code.store("ptr", step, code.at("%job", FIELDS + NAMES.index("states") * 8), 8)
        code.do("call void @run(ptr %job)")
        code.do(f"br label %{label}.over")
        code.begin(f"{label}.over")
    return code


class Team:
    """Helper threads and memory of a caller. A thread claims the team, computes one product after another, and releases
    it."""

    def __init__(self, alone: bool) -> None:
        functions = _functions()
        self._run, self._spread, self._help = functions["run"], functions["spread"], functions["help"]
        self._sequence, self._step = functions["sequence"], address(functions["step"])
        self._alone, self._lock = alone, threading.Lock()
        self._job = (ctypes.c_char * (LINE + FIELDS + FORM.size))()
        self._job_at = -(-ctypes.addressof(self._job) // LINE) * LINE
        self._fields_at = self._job_at - ctypes.addressof(self._job) + FIELDS
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
        threads = torch.get_num_threads() if parallel else 1 if watch.contended else _used
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

    def run_steps(self, steps: int, count: int) -> None:
        """Compute `count` steps, STEPs at an address, one after the other."""
        threads = 1 if watch.contended or self._alone else _used
        if threads > 1:
            self._wake(threads - 1)
        self._slots[0] = 0
        job = (0, 1, 1, 1, self._step, 0, 0, self._slots_at, 0, 0, threads - 1, 0, 0, 0, 0, 0, 0)
        self._pack(self._job, self._fields_at, *job)
        self._sequence(self._job_at, steps, count)

    def _wake(self, helpers: int) -> None:
        while len(self._helpers) < helpers:
            called = threading.Event()
            self._helpers.append(called)
            threading.Thread(target=self._work, args=(called,), name="moestro-rows", daemon=True).start()
        for called in self._helpers[:helpers]:
            if not called.is_set():
                called.set()

    def _work(self, called: threading.Event) -> None:
        while True:
            called.wait()
            self._help(self._job_at, PATIENCE)
            called.clear()

    def release(self) -> None:
        self._lock.release()


_used = 1


def share(threads: int) -> None:
    """Set the number of threads that share each product, for all callers; TORCHS: as many as torch has, and the very
    same where they can be had, else one."""
    global _used
    _used = threads


def shared_by() -> int:
    """What `share` has set."""
    return _used


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


@functools.cache
def _team() -> Team:
    return Team(alone=False)


@functools.cache
def _functions() -> dict[str, Function]:
    return compiled(_drain(), _run(), _spread(), _help(), _step(), _sequence(), width=32)
