"""The experts of a few rows in the fast arithmetic: steps that are written once and of which only addresses change.

Where every expert is in a slot, they are one native call with their sum, or steps of a program that follow the layer's
router. Otherwise the experts that are computed together are one call, and the sum is another. The outputs have the same
bits either way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from core.cache.lease import LeasedSegment
from core.memory.codec.fast.products import GIVEN, numbered
from core.memory.codec.fast.steps import Steps, Work, named, some
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.threads import acquire_team
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product, resident_first
from core.runtime.program import combine, group
from core.runtime.program.experts import ExpertKernels, FastMath, starts
from core.runtime.rows import NOTHING, Routed

ROWS = 9  # at most: a token and as many guesses as a pass verifies
CALLS = 64  # of experts that are computed together, which are kept
STEPS, ARGUMENTS = 8, 2048  # of such a call, and bytes of their arguments beside the numbers that change
PARTS = 256  # calls of some blocks of an expert, which are kept


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
    ones = [1] * pairs
    out, room = kernels.outputs_at(memory, count), kernels.room_at(memory, pairs, count)
    rows, places, slots = (steps.put([0] * pairs) for _ in range(3))
    up, down = map(steps.put, kernels.numbers(memory, [rows] * pairs, ones, kernels.outs(out, ones), room))
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


class SlotsOf:
    """The addresses of the slots of a layer's experts, whose blocks come in order, as several leased segments."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._found: dict[int, list[int]] = {}

    def until(self, one: LeasedSegment) -> list[int]:
        """Those of an expert's blocks until the last one of this segment."""
        slots = [slot.parts.at for slot in one.slots]
        if len(slots) == self._blocks:
            return slots
        found = self._found.setdefault(one.expert, [])
        assert len(found) == one.segment.blocks.start
        found += slots
        return found

    def all_of(self, one: LeasedSegment) -> list[int]:
        """The same; none until all blocks are there."""
        found = self.until(one)
        return found if len(found) == self._blocks else []


class FewRows:
    """As `core.runtime.rows.ExpertRows` for a few rows, in the fast arithmetic."""

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts."""
        self._rows, self._dtype = row_steps(math, *routed.weights.shape), hidden.dtype
        self._rows.x.copy_(hidden)
        self._rows.weights.copy_(routed.weights)
        self._chosen = routed.weights.shape[1]
        self._pairs: dict[int, list[int]] = {}  # of each expert: row * k + place
        for row, experts in enumerate(routed.chosen):
            for pair, expert in enumerate(experts, row * self._chosen):
                self._pairs.setdefault(expert, []).append(pair)
        self._pairs.pop(NOTHING, None)
        self._places = array("q", [NOTHING]) * routed.weights.numel()  # of each pair's output
        self._done, self._prepared, self._summed = 0, False, False
        self._slots = SlotsOf(self._rows.blocks)

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Resident experts, or what is resident of them, then the others, to be computed as they land."""
        return resident_first(segments, {}, 1, late_together=True)

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots. What is there of another is computed at once, of one row."""
        slots, counts, rows, done = list[int](), list[int](), list[int](), self._done
        parts = list[LeasedSegment]()
        blocks = self._rows.blocks
        if len(self._rows.x) == 1 and len(batch) == self._chosen and all(len(one.slots) == blocks for one in batch):
            self._compute_whole(batch)
            return
        for one in batch:
            pairs = self._pairs.get(one.expert)
            if pairs and len(one.slots) < blocks and len(self._rows.x) == 1:
                parts.append(one)
            elif pairs and (found := self._slots.all_of(one)):
                slots += found
                counts.append(len(pairs))
                rows += [pair // self._chosen for pair in pairs]
                self._place(pairs)
        if slots:
            self._rows.compute(slots, counts, rows, done, prepare=not self._prepared)
            self._prepared = True
        for one in parts:
            self._compute_part(one)

    def _compute_whole(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute the only row with all of its experts, and their sum."""
        ordered = sorted(batch, key=lambda one: self._pairs[one.expert])
        self._rows.whole.run([slot.parts.at for one in ordered for slot in one.slots])
        self._places, self._summed = array("q", range(self._chosen)), True

    def _compute_part(self, one: LeasedSegment) -> None:
        (pair,), first = self._pairs[one.expert], one.segment.blocks.start
        if not first:
            self._place([pair])
        slots = self._slots.until(one)
        self._rows.compute_part(slots, first, self._places[pair], prepare=not self._prepared)
        self._prepared = True

    def join(self, experts: Sequence[int], out: torch.Tensor) -> None:
        """Take the outputs [experts, H], fp32, of the only row through experts that were computed elsewhere."""
        assert len(self._rows.x) == 1, "several rows are computed on the device"
        self._rows.out[self._done : self._done + len(experts)].copy_(out)
        for expert in experts:
            self._place(self._pairs[expert])

    def _place(self, pairs: Sequence[int]) -> None:
        """The outputs of these pairs come next."""
        for pair in pairs:
            self._places[pair] = self._done
            self._done += 1

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output, valid until the next call; `tap` gets the experts' outputs [T * k, H] before their
        weights."""
        if tap is not None:
            tap(in_order(torch.tensor(self._places), self._rows.out))
        if not self._summed:
            self._rows.sum.run(self._places)
        return self._rows.total.to(self._dtype)


def in_order(places: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The outputs [done, H] pair by pair, 0 where there is none."""
    return torch.where((places >= 0)[:, None], out[places.clamp(min=0)], 0.0)


def row_steps(math: ExpertMath, count: int, chosen: int) -> RowSteps:
    """Those of passes over so many rows, which the layers of a model share."""
    assert isinstance(math, FastMath)
    kept = math.kernels.few
    if (count, chosen) not in kept:
        with torch.inference_mode(False):
            kept[count, chosen] = RowSteps(math.kernels, count, chosen)
    return kept[count, chosen]


def fast_all_hits(
    math: ExpertMath,
    segments: Sequence[LeasedSegment],
    hidden: torch.Tensor,
    order: Sequence[int],
    weights: torch.Tensor,
    tap: Tap | None = None,
) -> torch.Tensor:
    """As `core.runtime.rows.compute_all_hits`; valid until the next call."""
    row = row_steps(math, 1, len(segments))
    row.x.copy_(hidden)
    row.weights.copy_(weights)
    row.whole.run([slot.parts.at for one in segments for slot in one.slots])
    if tap is not None:
        tap(row.out)
    return row.total.to(hidden.dtype)
