"""Flags between a GPU's kernels and the host's threads, in pinned memory: the only place that knows how NVIDIA's GPUs
order them (PTX ISA, memory consistency model: release and acquire at system scope). What is not a GPU of NVIDIA's
(Triton's interpreter) has equal operations without an order of their own. Importing this module needs triton.
"""

import time
from typing import Any

import triton
import triton.language as tl
from torch.version import hip

ORDERED = not triton.knobs.runtime.interpret and hip is None
"""Whether kernels are made for GPUs whose flags these are."""


FENCE = tl.constexpr("fence.acq_rel.sys; mov.b64 $0, $1;")
STORE = tl.constexpr(
    "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
    " @first st.release.sys.global.b64 [$1], $2; mov.b64 $0, $2; }"
)


def _load_by_ptx(at: tl.tensor) -> tl.tensor:
    """The number at an address, int64: what its writer wrote before it is seen by what is read from here on."""
    return tl.inline_asm_elementwise("ld.acquire.sys.global.b64 $0, [$1];", "=l,l,~{memory}", [at], tl.int64, False, 1)


def _load_anywhere(at: tl.tensor) -> tl.tensor:
    return tl.load(at.to(tl.pointer_type(tl.int64)), volatile=True)


def _store_by_ptx(at: tl.tensor, value: tl.tensor) -> None:
    """Write a number to an address, int64. Who reads it sees all that this program wrote before: each thread's stores
    are ordered by a fence of its own, and those of all by a barrier before the first thread writes."""
    ordered = tl.inline_asm_elementwise(FENCE, "=l,l,~{memory}", [value], tl.int64, False, 1)
    tl.debug_barrier()
    tl.inline_asm_elementwise(STORE, "=l,l,l,~{memory}", [at, ordered], tl.int64, False, 1)


def _store_anywhere(at: tl.tensor, value: tl.tensor) -> None:
    tl.store(at.to(tl.pointer_type(tl.int64)), value)


def _now_by_ptx(like: tl.tensor) -> tl.tensor:
    """Nanoseconds of a clock that goes on while a program waits; `like` is any int64."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,l,~{memory}", [like], tl.int64, False, 1)


def _now_anywhere(like: tl.tensor) -> Any:
    return like * 0 + time.perf_counter_ns()


load: Any = triton.jit(_load_by_ptx) if ORDERED else triton.jit(_load_anywhere)
store: Any = triton.jit(_store_by_ptx) if ORDERED else triton.jit(_store_anywhere)
now: Any = triton.jit(_now_by_ptx) if ORDERED else _now_anywhere
