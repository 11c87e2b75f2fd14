"""Foretells which experts a pass over guesses visits: those that the same tokens have visited in the text so far.

Guesses out of the text stand in it, so that what followed them is compared position by position; of other guesses the
last place of the same token counts. Measured on the demo model (`tests/engine/test_draft_trace.py`), the union that is
foretold so is a fraction as far from the one that a pass then has as the mean of the passes before.
"""

from array import array
from bisect import bisect
from collections.abc import Iterator, Sequence
from operator import add, itemgetter
from typing import NamedTuple

from core.cache.expert_cache import ExpertCache
from core.engine.pass_price import Load
from core.runtime.draft_head import common
from core.runtime.recorder import Recorder
from core.types import ModelShape, Outcome

MOST_BYTES = 16 << 20  # of routing; what is older is dropped


class Foretold(NamedTuple):
    """What passes over the next token and some guesses are expected to visit. `rows` [n][L * k]: the eids of each of
    their first rows, as far as they are known; `loads` of passes over the first 1, 2, .. n of them; `missing`: those of
    all of them that the cache lacks."""

    rows: Sequence[Sequence[int]]
    loads: Sequence[Load]
    missing: Sequence[int]


class RoutingTrace:
    """Of one text at a time, for one loaded model: what its tokens have visited, as far as it was recorded."""

    def __init__(self, shape: ModelShape, expert_cache: ExpertCache, recorder: Recorder) -> None:
        self._shape, self._expert_cache, self._recorder = shape, expert_cache, recorder
        self._layer_eids = [layer * shape.experts for layer in range(shape.layers) for _ in range(shape.top_k)]
        self.forget()

    def forget(self) -> None:
        """What comes next belongs to no text that is known."""
        self._ids: Sequence[int] = []
        self._passes: list[tuple[int, array[int]]] = []  # where each begins in the text, and its experts [L, T, k]
        self._end = self._bytes = 0  # the position after the last, and what all take
        self._places: dict[int, int] = {}  # of tokens, the last position of each, of the first `_placed` positions
        self._placed = 0

    def passed(self, ids: Sequence[int], first: int, kept: int) -> None:
        """The latest pass has computed `kept` tokens that stay, those of `ids` from number `first` on. `ids` is the
        same list as long as it is the same answer, and grows."""
        if ids is not self._ids or first != self._end:
            self._cut(min(first, self._same(ids)))
            if self._end != first:  # what lies between was computed elsewhere
                self.forget()
            self._ids = ids
        raw = self._recorder.latest
        if raw is None or len(raw.layers) != self._shape.layers:
            return
        chosen = raw.chosen
        self._passes.append((first, chosen))
        self._end, self._bytes = first + kept, self._bytes + 2 * len(chosen)
        if self._bytes > MOST_BYTES:
            del self._passes[: -(-len(self._passes) // 2)]
            self._bytes = 2 * sum(len(one) for _, one in self._passes)

    def _same(self, ids: Sequence[int]) -> int:
        """Of how many tokens of `ids` it has the beginning."""
        return self._end if ids is self._ids else common(self._ids[: self._end], ids)

    def _cut(self, length: int) -> None:
        """Keep the first so many positions."""
        while self._passes and self._passes[-1][0] >= length:
            self._bytes -= 2 * len(self._passes.pop()[1])
        if length < self._placed:
            self._places, self._placed = {}, 0
        self._end = min(self._end, length)

    def load(self) -> Load | None:
        """Of the latest pass, where it is recorded."""
        raw = self._recorder.latest
        if raw is None or len(raw.layers) != self._shape.layers:
            return None
        if raw.requests is None:
            return Load(len(raw.chosen), 0)
        outcomes = raw.requests[2]
        return Load(len(outcomes), len(outcomes) - outcomes.count(Outcome.HIT))

    def foretell(self, ids: Sequence[int], draft: Sequence[int], place: int = -1) -> Foretold:
        """For a pass over the last of `ids` and the tokens of `draft`, which stand in the text from number `place` on,
        and again and again where they reach its end; -1 = they are from elsewhere."""
        if self._same(ids) < len(ids) - 1:
            return NOTHING
        rows, loads, missing = list[list[int]](), list[Load](), list[int]()
        seen = set[int]()
        for at in self._positions(ids, draft, place):
            row = self._row(at)
            if row is None:
                break
            new = {*row} - seen
            seen |= new
            missing += self._expert_cache.without_slots(new)
            rows.append(row)
            loads.append(Load(len(seen), len(missing)))
        return Foretold(rows, loads, missing)

    def _positions(self, ids: Sequence[int], draft: Sequence[int], place: int) -> Iterator[int]:
        """Of each row, where the same token stands; -1 = nowhere."""
        last = len(ids) - 1
        if place < 1:
            for at in range(self._placed, last):
                self._places[ids[at]] = at
            self._placed = last
            yield from (self._places.get(token, -1) for token in (ids[last], *draft))
            return
        yield place - 1
        for number in range(len(draft)):
            at = place + number % (len(ids) - place)
            yield at if at < last else place - 1  # what the last token visits is not known yet

    def _row(self, at: int) -> list[int] | None:
        """The eids [L * k] of a position, if they are known."""
        if not 0 <= at < self._end:
            return None
        number = bisect(self._passes, at, key=_first) - 1
        if number < 0:
            return None
        first, chosen = self._passes[number]
        if len(chosen) > len(self._layer_eids):  # of several rows
            k = self._shape.top_k
            rows = len(chosen) // len(self._layer_eids)
            starts = range((at - first) * k, len(chosen), rows * k)
            chosen = array("h", [expert for start in starts for expert in chosen[start : start + k]])
        return [*map(add, chosen, self._layer_eids)]


_first = itemgetter(0)
NOTHING = Foretold((), (), ())
