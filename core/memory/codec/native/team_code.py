"""What the threads of a team run, as LLVM instructions: they take units of a product until none is left."""

import functools
import struct

from core.system.native.compile import Function, compiled
from core.system.native.ir import Code

LINE = 64  # bytes: fields written by different threads lie in different cache lines
NEXT, OPEN, INSIDE, GIVE_UP, FIELDS = (LINE * i for i in range(5))
SPENT = GIVE_UP + 8  # clock ticks that sequences took, all together
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


def _field(code: Code, name: str, kind: str = "i64") -> str:
    return code.load(kind, code.at("%job", FIELDS + NAMES.index(name) * 8), 8)


def _atomic(code: Code, operation: str, place: int) -> str:
    return code.let(f"atomicrmw {operation} ptr {code.at('%job', place)}, i64 1 seq_cst, align 8")


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
    unit = _atomic(code, "add", NEXT)
    code.do(f"br i1 {code.let(f'icmp slt i64 {unit}, {units}')}, label %compute, label %over")
    code.begin("compute")
    one, part = code.let(f"udiv i64 {unit}, {parts}"), code.let(f"urem i64 {unit}, {parts}")
    first = code.times(part, rows)
    last = code.least(code.add(first, rows), outputs)
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
    """Generates @run(job): prepare the given states, then compute all units, together with the helpers."""
    code = Code("void @run(ptr %job)")
    _begin(code)
    code.do(f"store atomic i64 {_field(code, 'shared')}, ptr {code.at('%job', OPEN)} seq_cst, align 8")
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
    """Generates @help(job, patience): take part in products until none was open for `patience` ticks."""
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


STEP = struct.Struct("4q")  # address of a kernel (arguments, from, to), its arguments, units, and units at a time


def _step() -> Code:
    """Generates @step(step, slot, nothing, from, to): some units of a step."""
    code = Code("void @step(ptr %step, ptr %slot, ptr %nothing, i64 %from, i64 %to)")
    kernel, arguments = (code.load("ptr", code.at("%step", 8 * i), 8) for i in range(2))
    code.do(f"call void {kernel}(ptr {arguments}, i64 %from, i64 %to)")
    return code


def _sequence() -> Code:
    """Generates @sequence(job, stop, steps, count): one step after the other. Those of one part are computed at once,
    others together with the helpers. One of one part that writes at `stop` is the last; how many were computed is there
    then. Adds the ticks that all of it took to those at SPENT."""
    code = Code("void @sequence(ptr %job, ptr %stop, ptr %steps, i64 %count)")
    shared = code.let(f"icmp sgt i64 {_field(code, 'shared')}, 0")
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
        for name, value in (("units", parts), ("parts", parts), ("rows", some), ("outputs", units), ("given", "0")):
            code.store("i64", value, code.at("%job", FIELDS + NAMES.index(name) * 8), 8)
        code.store("ptr", step, code.at("%job", FIELDS + NAMES.index("states") * 8), 8)
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
    return compiled(_drain(), _run(), _spread(), _help(), _step(), _sequence(), _clock(), width=32)
