"""Belady's bound is the optimum: exhaustive search agrees, and no policy of ours does better."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from bench.bounds import belady_misses, overlapped_ms
from core.memory.link import Pace, scaled_gbps

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


def test_the_overlap_bound_and_the_scaled_link_are_their_formulas() -> None:
    pace = Pace(gbps=1.0, latency_us=0.0)
    assert overlapped_ms(2.0, 3.0, 1_000_000, pace) == 3.0
    assert overlapped_ms(5.0, 3.0, 1_000_000, pace) == 5.0
    assert scaled_gbps(layer_ms=1.0, size_bytes=770_000, latency_us=0.0) == 1.0
