"""The oracle of the other tests is the optimum: exhaustive search agrees."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.belady import belady_misses

steps = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2).map(sorted), min_size=1, max_size=8)


def fewest(trace: list[list[int]], slots: int) -> int:
    """Try every set of experts that could be kept after every step."""

    @cache
    def best(step: int, resident: frozenset[int]) -> int:
        if step == len(trace):
            return 0
        now = frozenset(trace[step])
        held = resident | now
        kept = [frozenset(k) | now for k in combinations(sorted(held - now), min(len(held - now), slots - len(now)))]
        return len(now - resident) + min(best(step + 1, k) for k in kept)

    return best(0, frozenset())


@given(trace=steps, slots=st.integers(2, 4))
def test_belady_is_the_optimum(trace: list[list[int]], slots: int) -> None:
    assert belady_misses(trace, slots, warm=False) == fewest(trace, slots)
    assert belady_misses(trace, slots) == fewest(trace, slots) - len({e for s in trace for e in s})
