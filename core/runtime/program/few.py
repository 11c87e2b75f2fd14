"""The experts of a few rows, for where each is in a slot: steps that follow a layer's router."""

import torch

from core.memory.codec.fast.products import numbered
from core.memory.codec.fast.steps import Steps, Work, named
from core.runtime.program import combine, group
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.mixer import some

ROWS = 9  # at most: a token and as many guesses as a pass verifies


def add(
    steps: Steps,
    kernels: ExpertKernels,
    ids: torch.Tensor,
    experts: tuple[int, int],
    table: int,
    x: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,
    memory: int,
) -> int:
    """Compute rows x [T, H] through the experts `ids` [T, k] with `weights` [T, k] -> their sums `total` [T, H]; the
    run of steps ends where one is in no slot. Returns the number of the step after the one that looks. `experts`: the
    place of the layer's first one in the table whose address is at `table`, and their number; `memory`: of
    `token_memory` bytes, aligned."""
    count, chosen = ids.shape
    pairs, hidden = count * chosen, kernels.hidden
    out, room = kernels.outputs_at(memory, count), kernels.room_at(memory, pairs, count)
    rows, places, slots = (steps.put([0] * pairs) for _ in range(3))
    up, down = map(steps.put, kernels.numbers(memory, [rows] * pairs, [1] * pairs, out, room))
    kernel = group.kernel(experts[1], chosen, count, 2 * kernels.inner * 4, hidden * 4)
    found = named(
        group.FIELDS,
        ids=ids,
        first=experts[0],
        table=table,
        stop=steps.stop,
        slots=slots,
        up=up,
        down=down,
        rows=rows,
        pairs=places,
        numbers=numbered(0),
        room=room,
        out=out,
    )
    steps.add(Work(kernel, found, 1, 1))
    looked = len(steps)
    steps.add(kernels.up.prepare(x.data_ptr(), x.stride(0) * 4, count, memory))
    steps.extend(kernels.works([1] * pairs, up, down, slots, room))
    summed = combine.kernel(combine.Combine(hidden, chosen))
    given = named(combine.FIELDS, experts=out, pairs=places, weights=weights, out=total)
    steps.add(Work(summed, given, count, some(count)))
    return looked
