"""The experts of many rows in the fast arithmetic: steps that are written anew for each call."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from core.cache.lease import LeasedSegment
from core.memory.codec.fast.steps import Work, named
from core.memory.codec.native.threads import acquire_team
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product
from core.runtime.program import combine
from core.runtime.program.experts import ExpertKernels, FastMath
from core.runtime.rows import NOTHING, Routed

PAIRS = 256  # rows of resident experts that are computed together: what is between the products stays in the cache


class Pairs:
    """Rows and the experts that they choose: which pairs an expert has, as row * k + place, and where the output of
    each is."""

    def __init__(self, routed: Routed) -> None:
        self.chosen = routed.ids.shape[1]
        self.of: dict[int, list[int]] = {}
        for row, experts in enumerate(routed.chosen):
            for place, expert in enumerate(experts, row * self.chosen):
                self.of.setdefault(expert, []).append(place)
        self.of.pop(NOTHING, None)
        self.places = array("q", [-1]) * (len(routed.chosen) * self.chosen)
        self.done = 0

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Resident experts together, as many as have PAIRS rows, then each of the others."""
        found: list[list[LeasedSegment]] = []
        size = PAIRS
        for one in segments:
            if one.ticket is None:
                if size >= PAIRS:
                    found.append([])
                    size = 0
                found[-1].append(one)
                size += len(self.of.get(one.expert, ()))
        return [*found, *([one] for one in segments if one.ticket is not None)]

    def take(self, batch: Sequence[LeasedSegment]) -> tuple[list[int], list[int], list[int]]:
        """Those of experts that are computed next -> the addresses of their slots, how many pairs each has, and the
        rows of these, one after the other as their outputs."""
        slots, counts, rows = list[int](), list[int](), list[int]()
        for one in batch:
            if pairs := self.of.get(one.expert):
                slots.append(one.slots[0].parts.at)
                counts.append(len(pairs))
                for pair in pairs:
                    self.places[pair] = self.done
                    self.done += 1
                    rows.append(pair // self.chosen)
        return slots, counts, rows

    def tapped(self, tap: Tap, out: torch.Tensor) -> None:
        """Show the outputs [done, H] pair by pair."""
        at = torch.tensor(self.places)
        tap(torch.where((at >= 0)[:, None], out[at.clamp(min=0)], 0.0))


class FastRows:
    """As `core.runtime.rows.ExpertRows` for several rows, in the fast arithmetic."""

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts."""
        assert isinstance(math, FastMath)
        self._steps, self._kernels, self._dtype, self._pairs = math.steps, math.kernels, hidden.dtype, Pairs(routed)
        self._x, self._weights = hidden.float().contiguous(), routed.weights.float().contiguous()
        self._out = torch.empty(sum(map(len, self._pairs.of.values())), self._kernels.hidden)
        self._prepared = False
        self.batches = self._pairs.batches

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots."""
        kernels, steps, done = self._kernels, self._steps, self._pairs.done
        slots, counts, rows = self._pairs.take(batch)
        if not slots:
            return
        with acquire_team() as team, steps:
            x = team.memory(FastRows, len(self._x) * kernels.up.prepared_bytes)
            if not self._prepared:
                self._prepared = True
                steps.add(kernels.up.prepare(self._x.data_ptr(), self._x.stride(0) * 4, len(self._x), x))
            memory = team.memory(ExpertKernels, kernels.memory(len(rows)))
            first, out = steps.put(rows), self._out.data_ptr() + done * kernels.hidden * 4
            given, after = kernels.numbers(x, indices(first, counts), counts, out, memory)
            steps.extend(kernels.works(counts, steps.put(given), steps.put(after), steps.put(slots), memory))
            steps.run(team)

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output; `tap` gets the experts' outputs [T * k, H] before their weights."""
        if tap is not None:
            self._pairs.tapped(tap, self._out)
        total = torch.empty(len(self._x), self._kernels.hidden)
        pairs, _ = self._pairs.places.buffer_info()
        given = named(combine.FIELDS, experts=self._out, pairs=pairs, weights=self._weights, out=total)
        kernel = combine.kernel(combine.Combine(self._kernels.hidden, self._pairs.chosen))
        with acquire_team() as team, self._steps as steps:
            steps.add(Work(kernel, given, len(total), 8))
            steps.run(team)
        return total.to(self._dtype)


def indices(first: int, counts: Sequence[int]) -> list[int]:
    """Where the numbers of each of `counts` begin, of consecutive ones from an address on."""
    return [first + 8 * done for done in accumulate(counts, initial=0)][:-1]
