"""The simulator's cache in arrays against the scalar core: what each request misses, and what stays."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.core import CacheCore
from core.cache.lease import in_waves
from core.cache.pool import numbered_pools
from core.policy.allocation.slots import shares
from core.policy.eviction import GONE
from core.policy.hints import Hints
from core.profile.trace import ArrayTrace, Chunk
from core.settings.registry import variants
from core.simulate import Config, Replay
from core.simulate.run import maker
from tests.selection import by_turns, examples

LAYERS, EXPERTS, K = 3, 7, 2
TOTAL = LAYERS * EXPERTS
NAMES = [v.name for v in variants("eviction")]


def told(usual: list[int], pinned: Sequence[int]) -> Hints:
    hints = Hints(LAYERS, EXPERTS)
    hints.profile(usual, pinned)
    return hints


def scalar(name: str, scope: str, slots: int, usual: list[int], pinned: Sequence[int], transit: int) -> CacheCore[int]:
    """A core that is filled as the simulator's is: pinned experts, then each layer's most used ones."""
    pools = numbered_pools(TOTAL, shares(slots, LAYERS) if scope == "layer" else [slots])
    core = CacheCore(LAYERS, EXPERTS, maker(Config(name, slots)), pools, told(usual, pinned))
    core.pinned, core.transit = frozenset(pinned), list(range(transit))
    for eid in [*pinned, *(core.hints.filling() if core.policy.retains else ())]:
        if not core.is_resident(eid) and core.pool(eid // EXPERTS).free:
            core.admit(eid)
    return core


def request(core: CacheCore[int], layer: int, wanted: Sequence[int]) -> int:
    """`layer` requests experts, in waves if they do not fit -> misses."""
    misses = 0

    def acquire(group: Sequence[int]) -> Sequence[int]:
        nonlocal misses
        eids = [layer * core.experts + expert for expert in group]
        missing = core.lease(layer, eids)
        for eid in missing:
            assert core.admit_requested(eid) is not None
        misses += len(missing)
        return eids

    for _ in in_waves(core, layer, wanted, acquire, core.release):
        assert all(core.is_resident(eid) for eid in core.leased)
    core.check_integrity()
    return misses


@pytest.mark.parametrize(("name", "scope"), by_turns(NAMES, ("layer", "global")))
@examples(12, fewer=3)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(LAYERS * (K + 1), TOTAL), min_size=1, max_size=3),
    pinned=st.lists(st.integers(0, EXPERTS - 1), max_size=LAYERS),
    passes=st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=30),
    transit=st.sampled_from([0, 1, K]),
)
def test_caches_side_by_side_do_what_the_scalar_core_does_for_each(
    name: str, scope: str, seed: int, sizes: list[int], pinned: list[int], passes: list[int], transit: int
) -> None:
    random = np.random.default_rng(seed)
    usual = random.integers(0, 9, TOTAL).tolist()
    pins = [layer * EXPERTS + expert for layer, expert in enumerate(pinned)]  # at most one a layer
    liked = random.gumbel(size=(LAYERS, EXPERTS))
    ids = np.argsort(-(liked + random.gumbel(size=(sum(passes), LAYERS, EXPERTS))), 2)[..., :K]
    cores = [scalar(name, scope, slots, usual, pins, transit) for slots in sizes]
    make, hints = maker(Config(name, sizes[0])), told(usual, pins)
    replay = Replay(ArrayTrace(ids, EXPERTS), make, sizes, scope, "filled", hints, transit)
    at = 0
    for size in passes:
        rows = ids[at : at + size]
        chunk = Chunk(rows.astype(np.uint8), np.array([size], np.int32), np.array([size == 1]), np.zeros(1, np.int32))
        _, missed = replay.feed(chunk)
        expected = []
        for core in cores:
            core.now = at + size
            for layer in range(LAYERS):
                core.chosen(layer, rows[:, layer])
                wanted = rows[0, layer].tolist() if size == 1 else np.unique(rows[:, layer]).tolist()
                expected.append(request(core, layer, wanted))
        assert missed[0].tolist() == expected
        resident = [core.is_resident(eid) for core in cores for eid in range(TOTAL)]
        assert (replay.cache.policy.score != GONE).tolist() == resident
        at += size
