"""One contract for every registered eviction policy, and an independent oracle for each of those that have one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Settings
from core.policy.eviction import Eviction
from core.registry import create, variants

NAMES = [v.name for v in variants("eviction")]
traces = st.lists(st.integers(0, 11), min_size=1, max_size=200)


def make(name: str, **params: int) -> Eviction:
    policy: Eviction = create("eviction", name, params)
    return policy


def replay(policy: Eviction, trace: Sequence[int], capacity: int) -> list[int | None]:
    """Drive a policy as the cache does; per access the expert that left, or None."""
    residents: set[int] = set()
    left: list[int | None] = []
    for now, eid in enumerate(trace):
        gone = None
        if eid not in residents:
            if len(residents) == capacity:
                gone = policy.victim({eid})
                assert gone in residents
                policy.remove(gone)
                residents.remove(gone)
            policy.admit(eid, now)
            residents.add(eid)
        policy.use(eid, now)
        left.append(gone)
    return left


@pytest.mark.parametrize("name", NAMES)
@given(trace=traces, capacity=st.integers(1, 6))
def test_the_victim_is_a_resident_and_choices_repeat(name: str, trace: list[int], capacity: int) -> None:
    assert replay(make(name), trace, capacity) == replay(make(name), trace, capacity)


@pytest.mark.parametrize("name", NAMES)
@given(trace=traces, blocked=st.sets(st.integers(0, 11)))
def test_a_blocked_expert_never_leaves(name: str, trace: list[int], blocked: set[int]) -> None:
    policy = make(name)
    for now, eid in enumerate(dict.fromkeys(trace)):
        policy.admit(eid, now)
        policy.use(eid, now)
    free = set(trace) - blocked
    victim = policy.victim(blocked)
    assert victim in free if free else victim is None


@given(trace=traces, capacity=st.integers(1, 6))
def test_lru_against_a_plain_list(trace: list[int], capacity: int) -> None:
    order: list[int] = []
    expected: list[int | None] = []
    for eid in trace:
        gone = None
        if eid in order:
            order.remove(eid)
        elif len(order) == capacity:
            gone = order.pop(0)
        order.append(eid)
        expected.append(gone)
    assert replay(make("lru"), trace, capacity) == expected


@pytest.mark.parametrize("half_life", [0, 3])
@given(trace=traces, capacity=st.integers(1, 6))
def test_lfu_against_the_definition(half_life: int, trace: list[int], capacity: int) -> None:
    def worth(eid: int, now: int, upto: int) -> tuple[float, int]:
        uses = [t for t in range(upto) if trace[t] == eid]
        return sum(0.5 ** ((now - t) / half_life) if half_life else 1.0 for t in uses), uses[-1]

    residents: set[int] = set()
    policy = make("lfu", half_life=half_life)
    for now, (eid, gone) in enumerate(zip(trace, replay(policy, trace, capacity), strict=True)):
        if gone is not None:
            count, _ = worth(gone, now, now)
            assert count <= min(worth(r, now, now)[0] for r in residents) * (1 + 1e-9)
            residents.remove(gone)
        residents.add(eid)


def test_lfu_worked_example() -> None:
    policy = make("lfu")
    for now, eid in enumerate([1, 1, 2, 3, 3]):
        if now in (0, 2, 3):
            policy.admit(eid, now)
        policy.use(eid, now)
    assert policy.victim(set()) == 2          # used once; 1 and 3 were used twice
    assert policy.victim({2}) == 1            # equal counts: the one unused for longest


def test_lfu_forgets_without_overflowing() -> None:
    policy = make("lfu", half_life=1)
    policy.admit(1, 0)
    for _ in range(50):
        policy.use(1, 0)
    policy.admit(2, 5000)
    policy.use(2, 5000)                        # 2^5000 would not fit a float
    assert policy.victim(set()) == 1


def test_random_depends_on_its_seed() -> None:
    def victims(seed: int) -> list[int | None]:
        return replay(make("random", seed=seed), [i * 7 % 12 for i in range(100)], 4)

    assert victims(0) != victims(1)


def test_every_variant_says_what_it_is() -> None:
    for kind in ("eviction", "predictor"):
        for variant in variants(kind):
            assert variant.help.endswith(".")
            assert variant.source
            assert Settings({kind: variant.name}).choice(kind)[0] == variant.name
            for param in variant.params:
                assert param.help
                assert param.check(param.default) == param.default
                assert param.type != "int" or (param.low is not None and param.high is not None)
