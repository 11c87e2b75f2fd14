"""Looks up the slots of a token's experts; where one is in none, the run of steps ends here."""

import functools

from core.runtime.program.vectors import Kernel

FIELDS = ("ids", "first", "table", "slots", "stop")


@functools.cache
def kernel(chosen: int) -> int:
    """The address of the kernel. One unit: ids [chosen], i64, of which id + `first` is an expert's place in a table of
    slots' addresses, i64, 0 = none; `table`: where the address of that is. Writes them to slots [chosen], and 1 to
    `stop`, i64, where one is 0."""
    code = Kernel("look")
    at = code.fields(FIELDS, ("first",))
    table = code.at(code.load("ptr", at["table"], 8), at["first"], 8)
    with code.loop(0, chosen) as each:
        place = code.integer(at["ids"], each.index)
        slot = code.integer(table, place)
        code.store("i64", slot, code.at(at["slots"], each.index, 8), 8)
        with code.where(code.let(f"icmp eq i64 {slot}, 0")):
            code.store("i64", "1", at["stop"], 8)
    return code.address()
