"""Uses that a policy gets in batches leave it as if it got each at once, for every policy and whenever it is read; and
it cannot be read without them. Leases of a core end one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.core import CacheCore
from core.cache.pool import numbered_pools
from core.cache.use_log import UseLog
from core.policy.eviction import GONE, ExpertIndex, policy_maker
from core.policy.eviction.base import Eviction
from core.settings.param import Choice
from core.settings.registry import variants

LAYERS, EXPERTS = 3, 6
POLICIES = [one.name for one in variants("eviction")]


class Recording(Eviction):
    def __init__(self, expert_index: ExpertIndex) -> None:
        super().__init__(expert_index)
        self.uses: list[tuple[int, int, int]] = []

    def used(self, ids: Any, tick: Any, now: int) -> None:
        self.uses += [(int(eid), int(at), now) for eid, at in zip(np.atleast_1d(ids), np.atleast_1d(tick), strict=True)]


@pytest.mark.long(0.1)
@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_a_batch_counts_as_each_use_at_once(name: str, data: st.DataObject) -> None:
    at_once, later = (policy_maker(Choice(name))(ExpertIndex(LAYERS, EXPERTS)) for _ in range(2))
    uses, tick, now = UseLog(later, LAYERS * EXPERTS), 0, 0
    there = st.sampled_from(range(LAYERS * EXPERTS))
    for eid in range(LAYERS * EXPERTS):
        tick += 1
        at_once.admitted(eid, tick, now)
        uses.policy.admitted(eid, tick, now)
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["use", "use", "pass", "read", "evict"]))
        if what == "use":
            eids = data.draw(st.lists(there, unique=True, max_size=EXPERTS))
            uses.note(tick, now, eids)
            for eid in eids:
                tick += 1
                at_once.used(eid, tick, now)
        elif what == "pass":
            now += data.draw(st.integers(1, 9))
        elif what == "evict":
            eid = data.draw(there)
            for policy in (at_once, uses.policy):
                policy.left(eid)
                policy.admitted(eid, tick + 1, now)
            tick += 1
        part = slice(0, LAYERS * EXPERTS)
        if what == "read":
            assert uses.policy.scores(part, now, 1).tolist() == at_once.scores(part, now, 1).tolist()
    assert uses.policy.score.tolist() == at_once.score.tolist()


def test_the_policy_gets_the_order_of_the_requests_with_their_ticks_and_pass() -> None:
    uses = UseLog(Recording(ExpertIndex(LAYERS, EXPERTS)), LAYERS * EXPERTS)
    assert uses.note(0, 7, [3, 1]) == 2
    assert uses.note(3, 7, [9], [3]) == 5  # tick 3 was an admission's; 3 once more in the same pass
    assert uses.note(5, 8, [1]) == 6
    policy = uses.policy
    assert isinstance(policy, Recording)
    assert policy.uses == [(3, 1, 7), (1, 2, 7), (9, 4, 7), (3, 5, 7), (1, 6, 8)]
    assert [uses.last[eid] for eid in (3, 1, 9, 0)] == [7, 8, 7, -1]


def test_a_use_of_an_expert_that_is_evicted_afterwards_does_not_bring_it_back() -> None:
    core = CacheCore(LAYERS, EXPERTS, policy_maker(Choice("lru")), numbered_pools(LAYERS * EXPERTS, [4]))
    for eid in (0, 1, 2, 3):
        assert core.admit(eid) is not None
    assert core.lease(0, [0, 1]) == []
    core.release([0, 1])
    core.evict(0)
    assert core.policy.score[0] == GONE
    assert core.admit(4) is not None and core.admit(5) is not None, "a free slot, then that of the one not used"
    assert [bool(core.table[eid]) for eid in range(6)] == [False, True, False, True, True, True]


def test_requests_of_leased_experts_are_held_until_they_may_be_evicted() -> None:
    uses = UseLog(Recording(ExpertIndex(LAYERS, EXPERTS)), LAYERS * EXPERTS)
    assert uses.note(0, 7, [1]) == 1 and uses.hold(2, 7, 0) == 3 and uses.hold(4, 7, 5) == 5
    order = uses.order
    assert isinstance(order, Recording) and order.uses == [(1, 1, 7)]
    assert uses.note(5, 7, [9]) == 6, "of the next layer: those of the one before are no longer leased"
    uses.flush()
    assert order.uses == [(1, 1, 7), (0, 3, 7), (5, 5, 7), (9, 6, 7)] and uses.policy is order
    uses.hold(6, 8, 2)
    uses.left(3)
    assert order.uses[-1] == (9, 6, 7)
    uses.left(2)
    assert order.uses[-1] == (2, 7, 8) and order.score[2] == GONE, "evicted while it was leased, for a copy that failed"
    uses.settle()
    assert uses.policy.score[2] == GONE


def test_two_leases_of_the_same_experts_end_one_by_one() -> None:
    core = CacheCore(LAYERS, EXPERTS, policy_maker(Choice("lru")), numbered_pools(LAYERS * EXPERTS, [4]))
    for eid in (0, 1, 2, 3):
        core.admit(eid)
    core.lease(0, [0, 1])
    core.lease(0, [0, 1])
    core.release([0, 1])
    assert core.leased == {0, 1}
    core.lease(0, [2])
    core.release([0, 1])
    assert core.leased == {2}
    core.release([2])
    assert not core.leased
