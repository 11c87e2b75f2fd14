"""Sorts the pairs of rows and experts by expert, and looks up the experts' slots: what products of a few rows read.

Where an expert is in no slot, the run of steps ends here.
"""

import functools

from core.memory.codec.fast.products import COUNT, GIVEN, INDEX, INTO
from core.runtime.program.vectors import Kernel

FIELDS = ("ids", "count", "first", "table", "stop", "slots", "up", "down", "rows", "pairs", "numbers", "room", "out")


@functools.cache
def kernel(experts: int, chosen: int, wide: int, hidden: int) -> int:
    """The address of the kernel. One unit: ids [count, chosen], i64, of which id + `first` is an expert's place in a
    table of slots' addresses, i64, 0 = none; `table`: where the address of that is. Of the pairs that are numbered so,
    those of an expert come to consecutive places, experts in the order in which rows first choose them:

    - pairs [count, chosen], i64: the place of each; rows [count * chosen], i64: the row of the pair at each place
    - slots [count * chosen], i64: the experts' slots
    - up and down [count * chosen, GIVEN]: the index, the number of rows and the first result of each expert's two
      products: they read the `rows` of x, and the places themselves (`numbers`: 0, 1 and so on, i64), and their results
      go to `room` and `out`, `wide` and `hidden` bytes each. Slots that are not needed multiply no row.
    - stop, i64: 1 where an expert is in no slot
    """
    code = Kernel("group")
    held, begun, state = code.stack(8 * experts), code.stack(8 * experts), code.stack(16)
    at = code.fields(FIELDS, ("count", "first"))
    most = code.times(at["count"], chosen)
    table, done = code.at(code.load("ptr", at["table"], 8), at["first"], 8), code.at(state, 8)
    code.run("llvm.memset.p0.i64", ("ptr", held), ("i8", "0"), ("i64", str(8 * experts)), ("i1", "false"))
    for of in (state, done):
        code.store("i64", "0", of, 8)
    with code.loop(0, most) as pair:
        place = code.at(held, code.integer(at["ids"], pair.index), 8)
        code.store("i64", code.add(code.load("i64", place, 8), 1), place, 8)
    with code.loop(0, most) as pair:
        expert = code.integer(at["ids"], pair.index)
        own = code.integer(held, expert)
        with code.where(code.let(f"icmp ne i64 {own}, 0")):
            index, first = code.load("i64", state, 8), code.load("i64", done, 8)
            slot = code.integer(table, expert)
            code.store("i64", slot, code.at(at["slots"], index, 8), 8)
            with code.where(code.let(f"icmp eq i64 {slot}, 0")):
                code.store("i64", "1", at["stop"], 8)
            for given, read, into, size in (("up", "rows", "room", wide), ("down", "numbers", "out", hidden)):
                numbers = code.at(at[given], index, 8 * GIVEN)
                code.store("ptr", code.at(at[read], first, 8), code.at(numbers, 8 * INDEX), 8)
                code.store("i64", own, code.at(numbers, 8 * COUNT), 8)
                code.store("ptr", code.at(at[into], first, size), code.at(numbers, 8 * INTO), 8)
            code.store("i64", first, code.at(begun, expert, 8), 8)
            code.store("i64", "0", code.at(held, expert, 8), 8)
            code.store("i64", code.add(index, 1), state, 8)
            code.store("i64", code.add(first, own), done, 8)
    with code.loop(0, at["count"]) as row, code.loop(0, chosen) as choice:
        pair_at = code.add(code.times(row.index, chosen), choice.index)
        place = code.at(begun, code.integer(at["ids"], pair_at), 8)
        first = code.load("i64", place, 8)
        code.store("i64", first, code.at(at["pairs"], pair_at, 8), 8)
        code.store("i64", row.index, code.at(at["rows"], first, 8), 8)
        code.store("i64", code.add(first, 1), place, 8)
    with code.loop(code.load("i64", state, 8), most) as left:
        for given in ("up", "down"):
            code.store("i64", "0", code.at(code.at(at[given], left.index, 8 * GIVEN), 8 * COUNT), 8)
    return code.address()
