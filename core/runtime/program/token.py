"""The experts of one row in the fast arithmetic: steps that are written once and of which only addresses change.

Where all experts are resident, they are one native call with their sum. Otherwise those that are computed together are
one, and the sum is another. The outputs have the same bits either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from core.cache.lease import LeasedSegment
from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.threads import acquire_team
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product, resident_first
from core.runtime.program import combine
from core.runtime.program.experts import ExpertKernels, FastMath
from core.runtime.rows import Routed


class Call(NamedTuple):
    """Steps, and where the addresses of the slots or the places that change are."""

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


class TokenSteps:
    """One row through `chosen` experts of any layer of a model. For one layer at a time."""

    def __init__(self, kernels: ExpertKernels, chosen: int) -> None:
        self._kernels, self._chosen = kernels, chosen
        self.x, self.total = torch.empty(1, kernels.hidden), torch.empty(1, kernels.hidden)
        self.weights = torch.empty(1, chosen)
        self._memory = torch.empty(kernels.token_memory(chosen) + LINE, dtype=torch.uint8)
        begin, results = -self._memory.data_ptr() % LINE, 4 * chosen * kernels.hidden
        self._prepared = self._memory.data_ptr() + begin
        self._results = kernels.outputs_at(self._prepared)
        self._room = kernels.room_at(self._prepared, chosen)
        out = self._memory[begin + kernels.up.prepared_bytes :][:results]
        self.out = out.view(torch.float32).view(chosen, kernels.hidden)
        self._groups: dict[tuple[int, int], Call] = {}
        steps, pairs = self._kernels.begun(chosen)
        given = self.x.data_ptr(), self.weights.data_ptr(), pairs, self.total.data_ptr(), self._prepared
        steps.extend(kernels.token(steps, chosen, *given))
        self.whole = Call(steps, pairs)
        steps, pairs = self._kernels.begun(chosen)
        at = {"experts": self._results, "pairs": pairs, "weights": given[1], "out": given[3]}
        steps.add(Work(combine.kernel(combine.Combine(kernels.hidden, chosen)), named(combine.FIELDS, **at), 1, 1))
        self.sum = Call(steps, pairs)

    def group(self, count: int, done: int) -> Call:
        """So many experts, whose outputs follow the first `done` ones. The first step prepares the row."""
        call = self._groups.get((count, done))
        if call is None:
            kernels, x, out = self._kernels, self.x.data_ptr(), self._results + 4 * done * self._kernels.hidden
            steps, slots = kernels.begun(count)
            steps.extend(kernels.row(steps, count, x, slots, out, self._prepared, self._room))
            call = self._groups[count, done] = Call(steps, slots)
        return call


def token_steps(math: ExpertMath, chosen: int) -> TokenSteps:
    """Those of an answer's token, which the layers of a model share."""
    assert isinstance(math, FastMath)
    kept = math.kernels.tokens
    if chosen not in kept:
        with torch.inference_mode(False):
            kept[chosen] = TokenSteps(math.kernels, chosen)
    return kept[chosen]


class FastToken:
    """As `core.runtime.rows.ExpertRows` for one row, in the fast arithmetic."""

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [1, H]: the state that `routed` sends to experts."""
        (self._order,) = routed.chosen
        self._token, self._dtype = token_steps(math, len(self._order)), hidden.dtype
        self._token.x.copy_(hidden)
        self._token.weights.copy_(routed.weights)
        self._prepared = False
        self._place: dict[int, int] = {}  # of the output of each expert that was computed

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Resident experts together, then each of the others."""
        return resident_first(segments, {}, 1, late_together=False)

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots."""
        slots, place = list[int](), self._place
        done = len(place)
        for one in batch:
            if one.expert in self._order:
                place[one.expert] = len(place)
                slots.append(one.slots[0].parts.at)
        if slots:
            self._token.group(len(slots), done).run(slots, 1 if self._prepared else 0)
            self._prepared = True

    def join(self, experts: Sequence[int], out: torch.Tensor) -> None:
        """Take the outputs [experts, H], fp32, of experts that were computed elsewhere."""
        done = len(self._place)
        self._token.out[done : done + len(experts)].copy_(out)
        for expert in experts:
            self._place[expert] = len(self._place)

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[1, H], valid until the next call; `tap` gets the experts' outputs [k, H] before their weights."""
        token, nothing = self._token, -1
        pairs = [self._place.get(expert, nothing) for expert in self._order]
        if tap is not None:
            rows = torch.tensor(pairs)
            tap(torch.where((rows >= 0)[:, None], token.out[rows.clamp(min=0)], 0.0))
        token.sum.run(pairs)
        return token.total.to(self._dtype)


def fast_all_hits(
    math: ExpertMath,
    segments: Sequence[LeasedSegment],
    hidden: torch.Tensor,
    order: Sequence[int],
    weights: torch.Tensor,
    tap: Tap | None = None,
) -> torch.Tensor:
    """As `core.runtime.rows.compute_all_hits`; valid until the next call."""
    token = token_steps(math, len(segments))
    token.x.copy_(hidden)
    token.weights.copy_(weights)
    token.whole.run([one.slots[0].parts.at for one in segments])
    if tap is not None:
        tap(token.out)
    return token.total.to(hidden.dtype)
