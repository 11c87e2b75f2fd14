"""Belady's optimum counted by itself, to hold simulations against."""

from collections.abc import Sequence


def belady_misses(trace: Sequence[Sequence[int]], slots: int, warm: bool = True) -> int:
    """Fewest misses of any eviction policy on one layer's requests, known in advance (MIN, Belady 1966).

    `trace[t]` = the distinct experts of step t, which are needed together. `warm` leaves out the first miss of each
    expert, which a cache that was filled before need not have."""
    uses: dict[int, list[int]] = {}
    for step, experts in enumerate(trace):
        for expert in experts:
            uses.setdefault(expert, []).append(step)
    cursor = dict.fromkeys(uses, 0)
    resident: set[int] = set()
    seen: set[int] = set()
    misses = 0
    for experts in trace:
        for expert in experts:
            cursor[expert] += 1
            if expert not in resident:
                misses += not warm or expert in seen
                seen.add(expert)
        resident |= set(experts)

        def next_use(expert: int) -> float:
            later = uses[expert]
            return later[cursor[expert]] if cursor[expert] < len(later) else float("inf")

        spare = sorted(resident - set(experts), key=lambda e: (-next_use(e), e))
        for expert in spare[: max(0, len(resident) - slots)]:
            resident.remove(expert)
    return misses
