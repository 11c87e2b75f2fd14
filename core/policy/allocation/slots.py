"""Division of slots into pools, and of experts into waves when more are needed than fit. Numbers only."""

from collections.abc import Callable, Sequence

WAVES = 8  # groups that a pool holds at once


def shares(slots: int, pools: int) -> list[int]:
    """Split `slots` over `pools` as evenly as whole slots allow, earlier pools first."""
    return [slots // pools + (1 if i < slots % pools else 0) for i in range(pools)]


def proportional(wanted: Sequence[float], slots: int, least: Sequence[int], most: int) -> list[int]:
    """Split `slots` in the proportions `wanted`, as near as whole slots from `least` to `most` allow, evenly where
    nothing is wanted. What rounding leaves goes to the pools that lack most of it, earlier ones first. There must be
    room for all slots."""
    if slots < sum(least):
        return shares(slots, len(wanted))
    total = sum(wanted)
    aim = [each * slots / total if total else slots / len(wanted) for each in wanted]
    sizes = [min(max(int(each), low), most) for each, low in zip(aim, least, strict=True)]
    while (over := sum(sizes) - slots) != 0:
        step = -1 if over > 0 else 1
        may = [i for i, size in enumerate(sizes) if (size > least[i] if over > 0 else size < most)]
        sizes[max(may, key=lambda i: (step * (aim[i] - sizes[i]), -i))] += step
    return sizes


def waves(wanted: Sequence[int], capacity: int, lacks: Callable[[int], int]) -> list[list[int]]:
    """Split experts of one layer into groups that fit a pool: while one group is computed, later ones are copied.
    `lacks`: the blocks of an expert that are missing, or just whether it is.

    One group when all fit. Else residents come first, and then those that lack least, so that nothing is evicted before
    its use: a small group of residents, whose slots are soon there for the first copies, then as many as were computed
    before, while as many are copied. The missing ones come in small groups, so that each is computed and leaves its
    slot soon after it has landed."""
    if len(wanted) <= capacity:
        return [list(wanted)]
    size = max(1, capacity // WAVES)
    resident = [expert for expert in wanted if not lacks(expert)]
    missing = sorted((expert for expert in wanted if lacks(expert)), key=lacks)
    groups, at = [resident[:size]] if resident else [], size
    while at < len(resident):
        groups.append(resident[at : min(2 * at, at + capacity)])
        at += len(groups[-1])
    return groups + [missing[i : i + size] for i in range(0, len(missing), size)]
