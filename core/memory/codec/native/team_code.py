"""What the threads of a team run, as LLVM instructions: steps one after the other, of each of which they take parts."""

import functools
import struct

from core.system.native.compile import Function, compiled
from core.system.native.ir import Code

LINE = 64  # bytes: fields written by different threads lie in different cache lines
NEXT, OPEN, INSIDE, GIVE_UP, FIELDS = (LINE * i for i in range(5))
SPENT = GIVE_UP + 8  # clock ticks that sequences took, all together
NAMES = ("kernel", "arguments", "units", "some", "parts", "helpers", "parallel")
FORM = struct.Struct(f"{len(NAMES)}q")
STEP = struct.Struct("4q")  # the first four: of a kernel (arguments, from, to) the units, and how many are a part


def _place(code: Code, name: str) -> str:
    return code.at("%job", FIELDS + NAMES.index(name) * 8)


def _field(code: Code, name: str, kind: str = "i64") -> str:
    return code.load(kind, _place(code, name), 8)


def _atomic(code: Code, operation: str, place: int) -> str:
    return code.let(f"atomicrmw {operation} ptr {code.at('%job', place)}, i64 1 seq_cst, align 8")


def _look(code: Code, place: int) -> str:
    return code.let(f"load atomic i64, ptr {code.at('%job', place)} seq_cst, align 8")


def _drain() -> Code:
    """Generates @drain(job): compute parts of the step until none is left."""
    code = Code("void @drain(ptr %job)")
    kernel, arguments = (_field(code, name, "ptr") for name in ("kernel", "arguments"))
    units, some, parts = (_field(code, name) for name in ("units", "some", "parts"))
    code.do("br label %take")
    code.begin("take")
    part = _atomic(code, "add", NEXT)
    code.do(f"br i1 {code.let(f'icmp slt i64 {part}, {parts}')}, label %compute, label %over")
    code.begin("compute")
    first = code.times(part, some)
    last = code.least(code.add(first, some), units)
    code.do(f"call void {kernel}(ptr {arguments}, i64 {first}, i64 {last})")
    code.do("br label %take")
    code.begin("over")
    return code


SPINS = 512  # turns of a wait before it gives the processor up: some microseconds


def pause(code: Code, turn: str) -> None:
    """One turn of a wait: a pause, and from SPINS turns on the processor to any thread that wants it. Nobody gains by a
    thread that spins where the one it waits for is stopped."""
    code.run("llvm.x86.sse2.pause")
    many = code.let(f"icmp sge i64 {turn}, {SPINS}")
    code.do(f"br i1 {many}, label %give_up, label %spin")
    code.begin("give_up")
    code.do(f"call i32 {code.load('ptr', code.at('%job', GIVE_UP), 8)}()")
    code.do("br label %spin")
    code.begin("spin")


def _run() -> Code:
    """Generates @run(job): compute the step together with the helpers."""
    code = Code("void @run(ptr %job)")
    code.do(f"store atomic i64 {_field(code, 'helpers')}, ptr {code.at('%job', OPEN)} seq_cst, align 8")
    code.do("call void @drain(ptr %job)")
    code.do(f"store atomic i64 0, ptr {code.at('%job', OPEN)} seq_cst, align 8")
    code.do("br label %computed")
    code.begin("computed")
    code.do("br label %left")
    code.begin("left")  # wait for helpers inside: they compute, or read fields
    turn = code.let("phi i64 [ 0, %computed ], [ %next, %spin ]")
    pause(code, turn)
    code.do(f"%next = add i64 {turn}, 1")
    code.do(f"br i1 {code.let(f'icmp eq i64 {_look(code, INSIDE)}, 0')}, label %over, label %left")
    code.begin("over")
    return code


def _help() -> Code:
    """Generates @help(job, patience): take part in steps until none was open for `patience` ticks."""
    code = Code("void @help(ptr %job, i64 %patience)")
    code.do("br label %fresh")
    code.begin("fresh")
    began = code.call("i64", "llvm.readcyclecounter")
    code.do("br label %watch")
    code.begin("watch")
    turn = code.let("phi i64 [ 0, %fresh ], [ %next, %wait ]")
    code.do(f"br i1 {code.let(f'icmp ne i64 {_look(code, OPEN)}, 0')}, label %enter, label %nothing")
    code.begin("nothing")
    pause(code, turn)
    code.do("br label %wait")
    code.begin("enter")  # the caller waits for helpers inside, so
    _atomic(code, "add", INSIDE)  # check again after the caller can see this helper
    code.do(f"br i1 {code.let(f'icmp ne i64 {_look(code, OPEN)}, 0')}, label %join, label %leave")
    code.begin("join")
    code.do("call void @drain(ptr %job)")
    code.do("br label %leave")
    code.begin("leave")
    _atomic(code, "sub", INSIDE)
    code.do("br label %fresh")
    code.begin("wait")
    code.do(f"%next = add i64 {turn}, 1")
    passed = code.let(f"sub i64 {code.call('i64', 'llvm.readcyclecounter')}, {began}")
    code.do(f"br i1 {code.let(f'icmp slt i64 {passed}, %patience')}, label %watch, label %over")
    code.begin("over")
    return code


def _sequence() -> Code:
    """Generates @sequence(job, stop, steps, count): one step after the other. Those of one part are computed at once,
    others together with the helpers, or with torch's threads where `parallel` is what starts these. One of one part
    that writes at `stop` is the last; how many were computed is there then. Adds the ticks that all of it took to those
    at SPENT."""
    code = Code("void @sequence(ptr %job, ptr %stop, ptr %steps, i64 %count)")
    helpers, parallel = _field(code, "helpers"), _field(code, "parallel", "ptr")
    shared, threads = code.let(f"icmp sgt i64 {helpers}, 0"), code.let(f"trunc i64 {code.add(helpers, 1)} to i32")
    began, spent = code.call("i64", "llvm.readcyclecounter"), code.at("%job", SPENT)
    with code.loop(0, "%count") as each:
        step = code.at("%steps", each.index, STEP.size)
        kernel, arguments = (code.load("ptr", code.at(step, 8 * i), 8) for i in range(2))
        units, some = (code.load("i64", code.at(step, 8 * i), 8) for i in range(2, 4))
        many = code.let(f"icmp slt i64 {some}, {units}")
        label = f"step{len(code.text())}"
        code.do(f"br i1 {code.let(f'and i1 {many}, {shared}')}, label %{label}.shared, label %{label}.alone")
        code.begin(f"{label}.alone")
        code.do(f"call void {kernel}(ptr {arguments}, i64 0, i64 {units})")
        stops = code.let(f"icmp ne i64 {code.load('i64', '%stop', 8)}, 0")
        code.do(f"br i1 {stops}, label %{label}.last, label %{label}.over")
        code.begin(f"{label}.last")
        code.store("i64", code.add(each.index, 1), "%stop", 8)
        code.do("br label %ended")
        code.begin(f"{label}.shared")
        parts = code.let(f"udiv i64 {code.add(units, code.let(f'sub i64 {some}, 1'))}, {some}")
        for name, value in (("kernel", kernel), ("arguments", arguments)):
            code.store("ptr", value, _place(code, name), 8)
        for name, value in (("units", units), ("some", some), ("parts", parts)):
            code.store("i64", value, _place(code, name), 8)
        code.do(f"store atomic i64 0, ptr {code.at('%job', NEXT)} seq_cst, align 8")
        own = code.let(f"icmp eq ptr {parallel}, null")
        code.do(f"br i1 {own}, label %{label}.own, label %{label}.torchs")
        code.begin(f"{label}.torchs")
        code.do(f"call void {parallel}(ptr @drain, ptr %job, i32 {threads}, i32 0)")
        code.do(f"br label %{label}.over")
        code.begin(f"{label}.own")
        code.do("call void @run(ptr %job)")
        code.do(f"br label %{label}.over")
        code.begin(f"{label}.over")
    code.do("br label %ended")
    code.begin("ended")
    took = code.let(f"sub i64 {code.call('i64', 'llvm.readcyclecounter')}, {began}")
    code.store("i64", code.add(code.load("i64", spent, 8), took), spent, 8)
    return code


def _clock() -> Code:
    """Generates @clock(at): write the ticks there."""
    code = Code("void @clock(ptr %at)")
    code.store("i64", code.call("i64", "llvm.readcyclecounter"), "%at", 8)
    return code


@functools.cache
def functions() -> dict[str, Function]:
    return compiled(_drain(), _run(), _help(), _sequence(), _clock())
