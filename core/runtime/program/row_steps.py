"""Steps of a few rows through a layer's experts, which are written once and of which only addresses change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from core.memory.codec.fast.products import GIVEN, numbered
from core.memory.codec.fast.steps import Steps, Work, named, some
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.threads import acquire_team
from core.runtime.program import combine, group
from core.runtime.program.experts import ExpertKernels, starts

ROWS = 9  # at most, of which experts are computed as they land: a token and as many guesses as a pass verifies
MOST = 33  # rows of a pass that is one native call while all experts are in slots
CALLS = 64  # of experts that are computed together, which are kept
STEPS, ARGUMENTS = 8, 2048  # of such a call, and bytes of their arguments beside the numbers that change
PARTS = 256  # calls of some blocks of an expert, which are kept


class LayerRows(NamedTuple):
    """Rows `x` [T, H] that go through the experts `ids` [T, k] of a layer with `weights` [T, k] -> their sums `total`
    [T, H]. `first` and `experts`: the place of the layer's first expert in a table of slots, and how many it has."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    total: torch.Tensor
    first: int
    experts: int


def add(steps: Steps, kernels: ExpertKernels, rows_of: LayerRows, table: int, memory: int) -> int:
    """Compute a layer's rows; the run of steps ends where an expert is in no slot. Returns the number of the step after
    the one that looks. The address of the table of slots is at `table`; `memory`: of `token_memory` bytes, aligned."""
    x, ids, weights, total, first, experts = rows_of
    count, chosen = ids.shape
    pairs, hidden = count * chosen, kernels.hidden
    ones = [1] * pairs
    out, room = kernels.outputs_at(memory, count), kernels.room_at(memory, pairs, count)
    rows, places, slots = (steps.put([0] * pairs) for _ in range(3))
    up, down = map(steps.put, kernels.numbers(memory, [rows] * pairs, ones, kernels.outs(out, ones), room))
    kernel = group.kernel(experts, chosen, kernels.wide * 4, hidden * 4)
    found = named(
        group.FIELDS,
        ids=ids,
        count=count,
        first=first,
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
    steps.extend(kernels.works(ones, up, down, slots, room))
    summed = combine.kernel(combine.Combine(hidden, chosen))
    given = named(combine.FIELDS, experts=out, pairs=places, weights=weights, out=total)
    steps.add(Work(summed, given, count, some(count)))
    return looked


class Call(NamedTuple):
    """Steps, and where the numbers that change are."""

    steps: Steps
    at: int

    def run(self, numbers: Sequence[int], first: int = 0) -> None:
        """Compute the steps from the `first` on with these numbers."""
        self.steps.change(self.at, numbers)
        team = acquire_team()
        try:
            self.steps.run(team, first)
        finally:
            team.release()


class RowSteps:
    """So many rows through `chosen` experts each, of any layer of a model. For one layer at a time."""

    def __init__(self, kernels: ExpertKernels, count: int, chosen: int) -> None:
        self._kernels, self.blocks, pairs = kernels, kernels.blocks, count * chosen
        self.x, self.total = torch.empty(count, kernels.hidden), torch.empty(count, kernels.hidden)
        self.weights = torch.empty(count, chosen)
        size = kernels.token_memory(pairs, count) + kernels.parts_memory(pairs) + LINE
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._prepared = self._memory.data_ptr() + -self._memory.data_ptr() % LINE
        self._results = kernels.outputs_at(self._prepared, count)
        self._room = kernels.room_at(self._prepared, pairs, count)
        begin = self._results - self._memory.data_ptr()
        out = self._memory[begin : begin + pairs * kernels.hidden * 4]
        self.out = out.view(torch.float32).view(pairs, kernels.hidden)
        self._groups: dict[tuple[int, int, int], Call] = {}
        self._parts: dict[tuple[int, int, int], Call] = {}
        steps, places = kernels.begun(pairs)
        at = {"experts": self._results, "pairs": places, "weights": self.weights.data_ptr()}
        given = named(combine.FIELDS, out=self.total.data_ptr(), **at)
        steps.add(Work(combine.kernel(combine.Combine(kernels.hidden, chosen)), given, count, some(count)))
        self.sum = Call(steps, places)

    @cached_property
    def whole(self) -> Call:
        """One row through all of its experts, and their sum."""
        count, chosen = self.weights.shape
        assert count == 1
        steps, slots = self._kernels.begun(chosen * self._kernels.blocks)
        given = self.x.data_ptr(), self.weights.data_ptr(), slots, self.total.data_ptr(), self._prepared
        steps.extend(self._kernels.token(steps, chosen, *given))
        return Call(steps, slots)

    def compute(
        self, slots: Sequence[int], counts: Sequence[int], rows: Sequence[int], done: int, *, prepare: bool
    ) -> None:
        """Compute as many of `rows` as there are `counts` with each expert, whose outputs follow the first `done` ones.
        `slots`: of each expert all of its blocks'. `prepare`: x is new."""
        first = 0 if prepare else 1
        if len(self.x) == 1:
            self._group(len(counts), len(rows), done).run(slots, first)
        else:
            call = self._group(len(counts), len(rows), 0)
            call.run([*slots, *rows, *self._numbers(call.at, counts, done)], first)

    def compute_part(self, slots: Sequence[int], first: int, place: int, *, prepare: bool) -> None:
        """Compute the only row with the blocks of an expert from the `first` on, whose output comes to a place once all
        of them were. `slots`: of all of its blocks until now."""
        key = len(slots), first, place
        if key not in self._parts:
            if len(self._parts) == PARTS:
                self._parts.pop(next(iter(self._parts)))
            self._parts[key] = self._part(*key)
        self._parts[key].run(slots, 0 if prepare else 1)

    def _part(self, until: int, first: int, place: int) -> Call:
        kernels = self._kernels
        steps = Steps(STEPS, ARGUMENTS + 8 * (until + GIVEN * (1 + kernels.blocks)))
        slots, out = steps.put([0] * until), self._results + place * kernels.hidden * 4
        room = kernels.part_at(self._room, self.weights.numel(), place)
        given, after = kernels.numbers(self._prepared, [numbered(0)], [1], [out], room)
        steps.add(kernels.up.prepare(self.x.data_ptr(), kernels.hidden * 4, 1, self._prepared))
        some = steps.put(given[GIVEN * first : GIVEN * until])
        steps.extend(kernels.part(first, until - first, some, steps.put(after), slots, room))
        return Call(steps, slots)

    def _numbers(self, at: int, counts: Sequence[int], done: int) -> list[int]:
        """Those of the two products of a call whose numbers are `at` an address."""
        read = starts(at + 8 * len(counts) * self._kernels.blocks, counts, 8)
        out = self._results + done * self._kernels.hidden * 4
        given, after = self._kernels.numbers(self._prepared, read, counts, self._kernels.outs(out, counts), self._room)
        return given + after

    def _group(self, experts: int, rows: int, done: int) -> Call:
        """So many experts, which have so many rows together. Their numbers are those of experts that have as many rows
        each."""
        call = self._groups.get((experts, rows, done))
        if call is None:
            kernels, blocks = self._kernels, experts * self._kernels.blocks
            numbers = blocks + rows + GIVEN * (blocks + experts)
            if len(self._groups) == CALLS:
                self._groups.pop(next(iter(self._groups)))
            steps = Steps(STEPS, ARGUMENTS + 8 * numbers)
            slots = steps.put([0] * numbers)
            given = slots + 8 * (blocks + rows)
            each, more = divmod(rows, experts)
            counts = [each + 1] * more + [each] * (experts - more)
            steps.change(given, self._numbers(slots, counts, done))
            steps.add(kernels.up.prepare(self.x.data_ptr(), kernels.hidden * 4, len(self.x), self._prepared))
            steps.extend(kernels.works(counts, given, given + 8 * GIVEN * blocks, slots, self._room))
            call = self._groups[experts, rows, done] = Call(steps, slots)
        return call
