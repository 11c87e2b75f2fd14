"""A token's experts of which some have no slot: the host is told of these, computes them, and their outputs are added
in the router's order, as `core.runtime.program.gpu.combine` adds those of all. Importing this module needs triton.

An expert without a slot has address 0 in the table. `state` [3] int64 on the device: the number of the last layer that
was published; how many experts the current layer misses; whether the host was late once, after which nothing waits.
"""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import rounded
from core.runtime.program.gpu import flags
from core.runtime.program.gpu import mailbox as places

PUBLISHED, LATE = tl.constexpr(places.PUBLISHED), tl.constexpr(places.LATE)
COUNT, DONE, IDS = tl.constexpr(places.COUNT), tl.constexpr(places.DONE), tl.constexpr(places.IDS)
load, store, now = flags.load, flags.store, flags.now


def _publish(
    x: tl.tensor,
    table: tl.tensor,
    ids: tl.tensor,
    rows: tl.tensor,
    state: tl.tensor,
    mail: tl.tensor,
    first: tl.tensor,
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program. rows [chosen] int64 = where among the host's outputs that of each of `ids` will be, -1 = it has a
    slot. Where any has none, the host is told, at the address `mail`: `first` + its number, and x [width]. M:
    core.runtime.program.gpu.mailbox.Mailbox; LANES: M.chosen or the next power of two."""
    lane = tl.arange(0, LANES)
    real = lane < M.chosen
    number = tl.load(ids + lane, mask=real, other=0)
    missing = (tl.load(table + number, mask=real, other=1) == 0).to(tl.int32)
    row, count = tl.cumsum(missing, 0) - missing, tl.sum(missing, 0)
    tl.store(rows + lane, tl.where(missing > 0, row, -1).to(tl.int64), mask=real)
    tl.store(state + 1, count.to(tl.int64))
    if count > 0:
        into = mail + IDS + row.to(tl.int64) * 8
        tl.store(into.to(tl.pointer_type(tl.int64)), first + number, mask=missing > 0)
        tl.store((mail + COUNT).to(tl.pointer_type(tl.int64)), count.to(tl.int64))
        states = tl.multiple_of((mail + M.x).to(tl.pointer_type(tl.float32)), 16)
        for begin in range(0, M.width, BLOCK):
            n = begin + tl.arange(0, BLOCK)
            tl.store(states + n, tl.load(x + n, mask=n < M.width, other=0).to(tl.float32), mask=n < M.width)
        published = tl.load(state) + 1
        store(mail + PUBLISHED, published)
        tl.store(state, published)


publish = triton.jit(_publish)


def _await_host(state: tl.tensor, mail: tl.tensor, LIMIT: tl.constexpr) -> None:
    """Return when the outputs of the layer that was published last are there, or after LIMIT nanoseconds, which the
    host is told of."""
    wanted = tl.load(state)
    if tl.load(state + 2) == 0:
        done = load(mail + DONE)
        if done != wanted:
            begun = now(wanted)
            passed = begun - begun
            while (done != wanted) & (passed < LIMIT):
                done = load(mail + DONE)
                passed = now(wanted) - begun
            if done != wanted:
                tl.store(state + 2, wanted)
                tl.store((mail + LATE).to(tl.pointer_type(tl.int64)), wanted)


await_host = triton.jit(_await_host)


def _join(
    resident: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    mail: tl.tensor,
    out: tl.tensor,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """out [width] = the sum of a token's experts by their weights [chosen] fp32, in their order: `resident` [chosen,
    width] fp32 of those with a slot, and the host's outputs, once they are there. Programs: blocks of the width."""
    if tl.load(state + 1) > 0:
        await_host(state, mail, LIMIT)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = n < M.width
    hosted = tl.multiple_of((mail + M.out).to(tl.pointer_type(tl.float32)), 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(M.chosen):
        row = tl.zeros((BLOCK,), tl.int64) + tl.load(rows + i)
        here = tl.load(resident + i * M.width + n, mask=known & (row < 0), other=0)
        there = tl.load(hosted + tl.maximum(row, 0) * M.width + n, mask=known & (row >= 0), other=0)
        weight = tl.zeros((BLOCK,), tl.float32) + tl.load(weights + i)
        total = tl.fma(weight, tl.where(row < 0, here, there), total)
    tl.store(out + n, rounded(total, out.dtype.element_ty), mask=known)


join = triton.jit(_join)
