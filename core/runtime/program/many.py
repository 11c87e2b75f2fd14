"""The experts of many rows in the fast arithmetic: steps that are written anew for each call."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from core.cache.lease import LeasedSegment
from core.memory.codec.fast.steps import Work, named
from core.memory.codec.native.threads import acquire_team
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product
from core.runtime.program import combine
from core.runtime.program.experts import ExpertKernels, FastMath
from core.runtime.program.few import SlotsOf, in_order
from core.runtime.rows import NOTHING, Routed

TOGETHER = 16 << 20  # bytes between the products of resident experts that are computed together, about


class FastRows:
    """As `core.runtime.rows.ExpertRows` for several rows, in the fast arithmetic. Pairs of a row and an expert are
    sorted by expert, and so are their outputs."""

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts."""
        assert isinstance(math, FastMath)
        self._steps, self._kernels, self._dtype = math.steps, math.kernels, hidden.dtype
        self._x, self._weights = hidden.float().contiguous(), routed.weights.float().contiguous()
        chosen = np.array(routed.chosen).ravel()
        order = chosen.argsort(kind="stable")[np.count_nonzero(chosen == NOTHING) :]
        firsts = np.flatnonzero(np.diff(chosen[order], prepend=NOTHING))
        counts = np.diff(firsts, append=len(order))
        pairs = zip(firsts.tolist(), counts.tolist(), strict=True)
        self._pairs = dict(zip(chosen[order[firsts]].tolist(), pairs, strict=True))  # of an expert: first, and how many
        self._rows = torch.from_numpy(order // len(routed.chosen[0]))
        self._places = torch.full((len(chosen),), NOTHING)
        self._places[order] = torch.arange(len(order))
        self._out = torch.empty(len(order), self._kernels.hidden)
        self._prepared, self._slots = False, SlotsOf(self._kernels.blocks)

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Resident experts together, until they need as much memory, then each of the others."""
        found: list[list[LeasedSegment]] = []
        most = TOGETHER // self._kernels.memory(1)
        size = most
        for one in segments:
            if one.ticket is None:
                if size >= most:
                    found.append([])
                    size = 0
                found[-1].append(one)
                size += self._pairs.get(one.expert, (0, 0))[1]
        return [*found, *([one] for one in segments if one.ticket is not None)]

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots, once all of each is."""
        there = {one.expert: slots for one in batch if one.expert in self._pairs and (slots := self._slots.all_of(one))}
        if not there:
            return
        kernels, steps = self._kernels, self._steps
        firsts, counts = zip(*[self._pairs[expert] for expert in there], strict=True)
        rows, out, long = self._rows.data_ptr(), self._out.data_ptr(), kernels.hidden * 4
        with acquire_team() as team, steps:
            x = team.memory(FastRows, len(self._x) * kernels.up.prepared_bytes)
            if not self._prepared:
                self._prepared = True
                steps.add(kernels.up.prepare(self._x.data_ptr(), self._x.stride(0) * 4, len(self._x), x))
            memory = team.memory(ExpertKernels, kernels.memory(sum(counts)))
            read, outs = [rows + 8 * first for first in firsts], [out + long * first for first in firsts]
            given, after = kernels.numbers(x, read, counts, outs, memory)
            found = steps.put([slot for found in there.values() for slot in found])
            steps.extend(kernels.works(counts, steps.put(given), steps.put(after), found, memory))
            steps.run(team)

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output; `tap` gets the experts' outputs [T * k, H] before their weights."""
        if tap is not None:
            tap(in_order(self._places, self._out))
        total = torch.empty(len(self._x), self._kernels.hidden)
        given = named(combine.FIELDS, experts=self._out, pairs=self._places, weights=self._weights, out=total)
        kernel = combine.kernel(combine.Combine(self._kernels.hidden, self._weights.shape[1]))
        with acquire_team() as team, self._steps as steps:
            steps.add(Work(kernel, given, len(total), 8))
            steps.run(team)
        return total.to(self._dtype)
