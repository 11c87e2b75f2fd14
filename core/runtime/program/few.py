"""The experts of a few rows in the fast arithmetic: steps that are written once, as those of one row.

Within a program's steps they follow the layer's router, for where every expert is in a slot. Otherwise the experts that
are computed together are one native call, and their sums are another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.cache.lease import LeasedSegment
from core.memory.codec.fast.products import GIVEN, numbered
from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.native.team_code import LINE
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product
from core.runtime.program import combine, group
from core.runtime.program.experts import ExpertKernels, FastMath
from core.runtime.program.many import Pairs, indices
from core.runtime.program.mixer import some
from core.runtime.program.token import Call
from core.runtime.rows import Routed

ROWS = 9  # at most: a token and as many guesses as a pass verifies
CALLS = 64  # of experts that are computed together, which are kept
STEPS, ARGUMENTS = 8, 2048  # of such a call, and bytes of their arguments beside the numbers that change


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
    kernel = group.kernel(experts[1], chosen, 2 * kernels.inner * 4, hidden * 4)
    found = named(
        group.FIELDS,
        ids=ids,
        count=count,
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


class RowSteps:
    """So many rows through `chosen` experts each, of any layer of a model. For one layer at a time."""

    def __init__(self, kernels: ExpertKernels, count: int, chosen: int) -> None:
        self._kernels, pairs = kernels, count * chosen
        self.x, self.total = torch.empty(count, kernels.hidden), torch.empty(count, kernels.hidden)
        self.weights = torch.empty(count, chosen)
        self._memory = torch.empty(kernels.token_memory(pairs, count) + LINE, dtype=torch.uint8)
        self.prepared = self._memory.data_ptr() + -self._memory.data_ptr() % LINE
        self.results = kernels.outputs_at(self.prepared, count)
        self.room = kernels.room_at(self.prepared, pairs, count)
        begin = self.results - self._memory.data_ptr()
        out = self._memory[begin : begin + pairs * kernels.hidden * 4]
        self.out = out.view(torch.float32).view(pairs, kernels.hidden)
        self._groups: dict[tuple[int, int], Call] = {}
        steps, places = kernels.begun(pairs)
        at = {"experts": self.results, "pairs": places, "weights": self.weights.data_ptr()}
        given = named(combine.FIELDS, out=self.total.data_ptr(), **at)
        steps.add(Work(combine.kernel(combine.Combine(kernels.hidden, chosen)), given, count, some(count)))
        self.sum = Call(steps, places)

    def compute(
        self, slots: Sequence[int], counts: Sequence[int], rows: Sequence[int], done: int, *, prepare: bool
    ) -> None:
        """Compute as many of `rows` as there are `counts` with the expert in each of `slots`, whose outputs follow the
        first `done` ones. `prepare`: x is new."""
        kernels, call = self._kernels, self._group(len(slots), len(rows))
        read = indices(call.at + 8 * len(slots), counts)
        out = self.results + done * kernels.hidden * 4
        given, after = kernels.numbers(self.prepared, read, counts, out, self.room)
        call.run([*slots, *rows, *given, *after], 0 if prepare else 1)

    def _group(self, experts: int, rows: int) -> Call:
        """So many experts, which have so many rows together."""
        call = self._groups.get((experts, rows))
        if call is None:
            kernels, numbers = self._kernels, experts + rows + 2 * GIVEN * experts
            if len(self._groups) == CALLS:
                self._groups.pop(next(iter(self._groups)))
            steps = Steps(STEPS, ARGUMENTS + 8 * numbers)
            slots = steps.put([0] * numbers)
            given = slots + 8 * (experts + rows)
            each, more = divmod(rows, experts)
            counts = [each + 1] * more + [each] * (experts - more)  # as many as there are; each may have others
            steps.add(kernels.up.prepare(self.x.data_ptr(), kernels.hidden * 4, len(self.x), self.prepared))
            steps.extend(kernels.works(counts, given, given + 8 * GIVEN * experts, slots, self.room))
            call = self._groups[experts, rows] = Call(steps, slots)
        return call


class FewRows:
    """As `core.runtime.rows.ExpertRows` for a few rows, in the fast arithmetic."""

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts."""
        assert isinstance(math, FastMath)
        self._rows = _row_steps(math.kernels, *routed.weights.shape)
        self._pairs, self._dtype = Pairs(routed), hidden.dtype
        self._rows.x.copy_(hidden)
        self._rows.weights.copy_(routed.weights)
        self.batches = self._pairs.batches

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots."""
        done = self._pairs.done
        slots, counts, rows = self._pairs.take(batch)
        if slots:
            self._rows.compute(slots, counts, rows, done, prepare=not done)

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output, valid until the next call; `tap` gets the experts' outputs [T * k, H] before their
        weights."""
        if tap is not None:
            self._pairs.tapped(tap, self._rows.out)
        self._rows.sum.run(self._pairs.places)
        return self._rows.total.to(self._dtype)


def _row_steps(kernels: ExpertKernels, count: int, chosen: int) -> RowSteps:
    """Those of passes over so many rows, which the layers of a model share."""
    found = kernels.few.get((count, chosen))
    if found is None:
        with torch.inference_mode(False):
            found = kernels.few[count, chosen] = RowSteps(kernels, count, chosen)
    return found
