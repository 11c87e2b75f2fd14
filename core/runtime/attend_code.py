"""What a thread runs that attends to a GPU's token, as LLVM instructions: it waits until a layer's missing experts are
published (core.runtime.program.gpu.mailbox), computes them, and says so, until it is dismissed.

A plan is numbers of 8 bytes: where the mailbox is, where every expert is in host memory, the function that computes
steps, and the number of the last layer that was computed. Then, for each count of experts up to the most: as
`core.memory.codec.fast.steps.Steps.all` has them, and where the addresses of the experts are written.
"""

import functools

from core.memory.codec.native.team_code import pause
from core.runtime.program.gpu.mailbox import COUNT, DONE, IDS, PUBLISHED
from core.system.native.compile import Function, compiled
from core.system.native.ir import Code

MAIL, HOME, SEQUENCE, LAST, FIELDS = (8 * i for i in range(5))
EACH = 4  # numbers of a count of experts


def _attend() -> Code:
    """Generates @attend(job, dismissed, plan, _): `job` is the team that shares the steps, `dismissed` the address of a
    number that is 0 until nothing more is to be computed."""
    code = Code("void @attend(ptr %job, ptr %dismissed, ptr %plan, i64 %unused)")
    mail, home, sequence = (code.load("ptr", code.at("%plan", at), 8) for at in (MAIL, HOME, SEQUENCE))
    published, done = code.at(mail, PUBLISHED), code.at(mail, DONE)
    code.do("br label %fresh")
    code.begin("fresh")
    last = code.load("i64", code.at("%plan", LAST), 8)
    code.do("br label %watch")
    code.begin("watch")
    turn = code.let("phi i64 [ 0, %fresh ], [ %next, %spin ]")
    code.do(f"%next = add i64 {turn}, 1")
    number = code.let(f"load atomic i64, ptr {published} acquire, align 8")
    code.do(f"br i1 {code.let(f'icmp ne i64 {number}, {last}')}, label %work, label %nothing")
    code.begin("work")
    count = code.load("i64", code.at(mail, COUNT), 8)
    entry = code.at("%plan", code.add(code.times(code.let(f"sub i64 {count}, 1"), 8 * EACH), FIELDS))
    stop, steps, slots = (code.load("ptr", code.at(entry, 8 * i), 8) for i in (0, 1, 3))
    with code.loop(0, count) as each:
        expert = code.load("i64", code.at(code.at(mail, IDS), each.index, 8), 8)
        code.store("i64", code.load("i64", code.at(home, expert, 8), 8), code.at(slots, each.index, 8), 8)
    length = code.load("i64", code.at(entry, 16), 8)
    code.do(f"call void {sequence}(ptr %job, ptr {stop}, ptr {steps}, i64 {length})")
    code.store("i64", number, code.at("%plan", LAST), 8)
    code.do(f"store atomic i64 {number}, ptr {done} release, align 8")
    code.do("br label %fresh")
    code.begin("nothing")
    over = code.let("load atomic i64, ptr %dismissed acquire, align 8")
    code.do(f"br i1 {code.let(f'icmp ne i64 {over}, 0')}, label %over, label %wait")
    code.begin("wait")
    pause(code, turn)
    code.do("br label %watch")
    code.begin("over")
    return code


@functools.cache
def functions() -> dict[str, Function]:
    return compiled(_attend())
