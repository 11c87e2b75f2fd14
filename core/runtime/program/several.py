"""Several steps that do not read what the others write, as one: threads wait for each other once, not after each."""

import functools
from collections.abc import Sequence

from core.memory.codec.fast.steps import Work
from core.runtime.program.vectors import Kernel

EACH = 5  # numbers of a step: kernel, arguments, units, units at a time, and the first unit of the one that it is in


def several(works: Sequence[tuple[Work, int]]) -> Work:
    """One step of `works`, each with the address of its arguments; for one thread if each of them is."""
    numbers, parts = list[int](), 0
    for work, arguments in works:
        some = min(work.some, work.units)
        numbers += (work.kernel, arguments, work.units, some, parts)
        parts += -(-work.units // some)
    return Work(_kernel(len(works)), numbers, parts, parts if parts == len(works) else 1)


@functools.cache
def _kernel(count: int) -> int:
    """The address of the kernel: a unit is some units of one of the steps."""
    code = Kernel("several")
    with code.loop("%from", "%to") as unit:
        for i in range(count):
            fields = [code.load("i64", code.at("%arguments", 8 * (EACH * i + field)), 8) for field in range(1, EACH)]
            arguments, units, some, begin = fields
            part = code.let(f"sub i64 {unit.index}, {begin}")
            first = code.times(part, some)
            begun, left = (code.let(f"icmp {one}") for one in (f"sge i64 {part}, 0", f"slt i64 {first}, {units}"))
            with code.where(code.let(f"and i1 {begun}, {left}")):
                kernel = code.load("ptr", code.at("%arguments", 8 * EACH * i), 8)
                given = code.let(f"inttoptr i64 {arguments} to ptr")
                last = code.least(code.add(first, some), units)
                code.do(f"call void {kernel}(ptr {given}, i64 {first}, i64 {last})")
    return code.address()
