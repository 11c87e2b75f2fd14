"""What the last program of a launch does: it goes on with what all of them have stored. Importing this module needs
triton.

PTX ISA, memory consistency model: a program's stores come before its barrier, this before the first thread's addition,
which releases them to the GPU; and who adds last acquires what all others have released, before the barrier behind it.
"""

import triton
import triton.language as tl


def _is_last(counter: tl.tensor, PROGRAMS: tl.constexpr) -> tl.tensor:
    """Whether all PROGRAMS that count here are through: true for one of them, which sees what all have stored. The
    counter, int32, is 0 before a launch and after it."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


is_last = triton.jit(_is_last)
