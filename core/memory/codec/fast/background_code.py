"""What a team that computes in the background runs, as LLVM instructions: it takes a run of steps that another thread
posts, and lets that thread take part until it is done.

A post goes through the states EMPTY or DONE -> POSTED -> TAKEN (by the team) -> DONE, or POSTED -> RECALLED (by the
thread that posted it).
"""

import functools

from core.memory.codec.native.team_code import FIELDS, INSIDE, OPEN, pause
from core.system.native.compile import Function, compiled
from core.system.native.ir import Code

EMPTY, POSTED, TAKEN, DONE, RECALLED = range(5)
STATE = 0
NAMES = ("sequence", "drain", "team", "stop", "steps", "count", "began", "ended")


def place(name: str) -> int:
    """Where a number of a post is, in bytes from its begin."""
    return FIELDS + 8 * NAMES.index(name)


def _field(code: Code, name: str, kind: str = "i64") -> str:
    return code.load(kind, code.at("%job", place(name)), 8)


def _state(code: Code) -> str:
    return code.let("load atomic i64, ptr %job seq_cst, align 8")


def _take(code: Code, state: int) -> str:
    """Whether a post is this thread's now, which gives it another state."""
    pair = code.let(f"cmpxchg ptr %job, i64 {POSTED}, i64 {state} seq_cst seq_cst")
    return code.let(f"extractvalue {{ i64, i1 }} {pair}, 1")


def _idle(code: Code, turn: str, back: str) -> None:
    """One turn of a wait, and then back, until `patience` is over."""
    pause(code, turn)
    code.do(f"%next = add i64 {turn}, 1")
    passed = code.let(f"sub i64 {code.call('i64', 'llvm.readcyclecounter')}, %since")
    code.do(f"br i1 {code.let(f'icmp slt i64 {passed}, %patience')}, label %{back}, label %over")


def _watch(code: Code) -> str:
    """Begins a wait: turns of it, from `fresh` on."""
    code.do("br label %fresh")
    code.begin("fresh")
    code.do("%since = call i64 @llvm.readcyclecounter()")
    code.declared.add("declare i64 @llvm.readcyclecounter()")
    code.do("br label %watch")
    code.begin("watch")
    return code.let("phi i64 [ 0, %fresh ], [ %next, %spin ]")


def _serve() -> Code:
    """Generates @serve(job, patience): compute what is posted until nothing was for `patience` ticks."""
    code = Code("void @serve(ptr %job, i64 %patience)")
    turn = _watch(code)
    code.do(f"br i1 {code.let(f'icmp eq i64 {_state(code)}, {POSTED}')}, label %take, label %nothing")
    code.begin("take")
    code.do(f"br i1 {_take(code, TAKEN)}, label %work, label %fresh")
    code.begin("work")
    code.store("i64", code.call("i64", "llvm.readcyclecounter"), code.at("%job", place("began")), 8)
    sequence, team, stop, steps = (_field(code, name, "ptr") for name in ("sequence", "team", "stop", "steps"))
    code.do(f"call void {sequence}(ptr {team}, ptr {stop}, ptr {steps}, i64 {_field(code, 'count')})")
    code.store("i64", code.call("i64", "llvm.readcyclecounter"), code.at("%job", place("ended")), 8)
    code.do(f"store atomic i64 {DONE}, ptr %job seq_cst, align 8")
    code.do("br label %fresh")
    code.begin("nothing")
    _idle(code, turn, "watch")
    code.begin("over")
    return code


def _assist() -> Code:
    """Generates @assist(job, patience): take part in what the team computes until it is done, or until nothing could
    be taken for `patience` ticks."""
    code = Code("void @assist(ptr %job, i64 %patience)")
    turn = _watch(code)
    code.do(f"br i1 {code.let(f'icmp eq i64 {_state(code)}, {DONE}')}, label %over, label %look")
    code.begin("look")
    team, drain = _field(code, "team", "ptr"), _field(code, "drain", "ptr")
    is_open, inside = code.at(team, OPEN), code.at(team, INSIDE)
    look = f"load atomic i64, ptr {is_open} seq_cst, align 8"
    code.do(f"br i1 {code.let(f'icmp ne i64 {code.let(look)}, 0')}, label %enter, label %nothing")
    code.begin("enter")  # as helpers do: the one that opened the step waits for those inside
    code.let(f"atomicrmw add ptr {inside}, i64 1 seq_cst, align 8")
    code.do(f"br i1 {code.let(f'icmp ne i64 {code.let(look)}, 0')}, label %join, label %leave")
    code.begin("join")
    code.do(f"call void {drain}(ptr {team})")
    code.do("br label %leave")
    code.begin("leave")
    code.let(f"atomicrmw sub ptr {inside}, i64 1 seq_cst, align 8")
    code.do("br label %fresh")
    code.begin("nothing")
    _idle(code, turn, "watch")
    code.begin("over")
    return code


def _post() -> Code:
    """Generates @post(job)."""
    code = Code("void @post(ptr %job)")
    code.do(f"store atomic i64 {POSTED}, ptr %job seq_cst, align 8")
    return code


def _recall() -> Code:
    """Generates @recall(job): take back what was posted, unless the team has begun with it."""
    code = Code("void @recall(ptr %job)")
    _take(code, RECALLED)
    return code


@functools.cache
def functions() -> dict[str, Function]:
    return compiled(_serve(), _assist(), _post(), _recall())
