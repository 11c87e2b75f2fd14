"""The formula of every eviction policy, on an example worked out by hand."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from core.policy.eviction import GONE, Eviction, victim
from core.policy.hints import UNLIKELY, Hints
from tests.policy.test_eviction import EXPERTS, LAYERS, SIZE, make


def fed(policy: Eviction, uses: Sequence[int]) -> Eviction:
    """Experts used one by one, one pass each; each is admitted at its first use."""
    for now, eid in enumerate(uses):
        if policy.score[eid] == GONE:
            policy.admitted(eid, now, now)
        policy.used(eid, now, now)
    return policy


def order(policy: Eviction, now: int = 0, layer: int = 0) -> list[int]:
    """Residents as they would leave, first to last."""
    gone: list[int] = []
    while (eid := victim(policy, slice(0, policy.expert_index.size), now, layer, gone)) is not None:
        gone.append(eid)
    return gone


def test_lcp_counts_the_tokens_of_a_prompt() -> None:
    # A prompt of 100 tokens: 98 choose expert 0, one each 1 and 2. Then a token uses 1, and another one 2.
    policy = make("lcp", rho=0.25, omega=128)
    ids = np.arange(3)
    policy.chosen(ids, np.array([98, 1, 1]))
    policy.admitted(ids, ids, 100)
    policy.used(ids, ids, 100)
    assert policy.score[0] - policy.score[1] == pytest.approx(np.log2(98)), "mu = 98, not 1"
    policy.used(1, 3, 101)
    policy.used(2, 4, 102)
    assert order(policy) == [1, 2, 0]


def test_class_lru_by_hand() -> None:
    # Expert 0 is used 5 times by token 4, and 1 and 4 once each after it, at tokens 5 and 6. 5 uses within 4 tokens are
    # worth 4.95: class 2. At token 20 in layer 0 the ages in layers are 48, 45 and 41; for their classes 12, 45, 41.
    policy = fed(make("class_lru"), [0, 0, 0, 0, 0, 1, 4])
    assert policy.scores(slice(0, 5), 20, 0)[[0, 1, 4]].tolist() == [-12.0, -45.0, -41.0]
    assert order(policy, now=20) == [1, 4, 0]
    # Idle for 10 more tokens than 4 times as long as 1, it leaves first.
    policy.used(1, 60, 60)
    assert order(policy, now=70) == [4, 0, 1]
    # Uses outlive an eviction: used once more, it has not begun anew.
    policy.left(0)
    policy.admitted(0, 70, 70)
    policy.used(0, 70, 70)
    assert policy.scores(slice(0, 1), 72, 0).tolist() == [-6.0 / 4], "2^-(66 / 128) x 4.95 + 1 = 4.4: class 2 again"


def test_least_stale_by_hand() -> None:
    # Three layers of four. While layer 1 is computed, layer 2 is 0 away, layer 0 is 1 away, layer 1 itself 2.
    policy = fed(make("least_stale"), [0, 4, 8, 5])
    assert order(policy, layer=1) == [4, 5, 0, 8]
    assert order(policy, layer=0) == [0, 8, 4, 5]


def test_plec_by_hand() -> None:
    hints = Hints(LAYERS, EXPERTS)
    policy = fed(make("plec", hints), [0, 1, 4, 5, 8, 9])
    # Layer 0 is being computed: its own go first, then layer 2, which is further ahead than layer 1.
    assert order(policy, layer=0) == [0, 1, 8, 9, 4, 5]
    hints.name([(1, 0, 0.9), (2, 1, 0.5), (0, 0, 0.5)])  # 4 and 9 are wanted soon, 0 by the next token
    assert order(policy, layer=0) == [1, 0, 8, 5, 9, 4]
    hints.reached(1)
    assert order(policy, layer=1) == [4, 5, 1, 0, 8, 9]  # layer 1's own experts are the furthest from their next use
    # Experts 2 and 6 were prefetched and never used, and so was 10: of the layers passed they leave before the others.
    for tick, eid in enumerate((2, 6, 10), 100):
        policy.admitted(eid, tick, 5)
    assert order(policy, layer=1) == [6, 2, 4, 5, 1, 0, 8, 10, 9]
    hints.name([(0, 2, 0.5)])  # for the next token
    assert order(policy, layer=1) == [6, 4, 5, 0, 1, 2, 8, 10, 9]


def test_finemoe_by_hand() -> None:
    # Visits, counted from one: 2, 3, 4. The largest 1 / (p x freq) leaves; with p = 1, .5, .1: 1/2, 2/3, 5/2.
    hints = Hints(LAYERS, EXPERTS)
    policy = fed(make("finemoe", hints), [0, 1, 1, 2, 2, 2])
    assert order(policy) == [0, 1, 2]  # no map and no profile: LFU
    hints.tell(0, [1.0, 0.5, 0.1, 0.0])
    assert order(policy) == [2, 1, 0]
    assert hints.probability[3] == UNLIKELY
    hints.name([(0, 2, 0.9)])
    hints.reached(0)
    assert order(policy) == [2, 1, 0]  # neither naming experts nor reaching their layer changes what a map said


def test_finemoe_before_any_map_goes_by_the_profiles_shares() -> None:
    hints = Hints(LAYERS, EXPERTS)
    hints.profile([6, 3, 1, 0, *[5] * 4, *[0] * 4])
    assert hints.probability.tolist() == [0.6, 0.3, 0.1, UNLIKELY, *[0.25] * 4, *[0.25] * 4]
    policy = fed(make("finemoe", hints), [0, 1, 1, 2, 2, 2, 4, 8])
    # p x visits: 1.2, .9, .4; layers 1 and 2, used alike: .5 each.
    assert order(policy) == [2, 4, 8, 1, 0]
    hints.tell(1, [0.9, 0.05, 0.03, 0.02])
    hints.profile([1, 3, 6, 0, *[5] * 4, *[0] * 4])  # another profile: a map stays
    assert hints.probability[4] == 0.9 and hints.probability[0] == 0.1
    hints.forget()
    assert hints.probability[4] == 0.25


def test_static_by_hand() -> None:
    hints = Hints(LAYERS, EXPERTS)
    policy = fed(make("static", hints), [2, 0, 1, 3, 2])
    assert order(policy) == [0, 1, 3, 2]  # nothing is known: LRU
    hints.profile([5, 9, 0, 7, *[0] * 8], pinned=[0])
    assert order(policy) == [2, 3, 1, 0]


def test_random_is_even() -> None:
    policy = fed(make("random"), range(SIZE))
    gone = Counter(victim(policy, slice(0, SIZE), now, now % LAYERS) for now in range(6000))
    assert len(gone) == SIZE
    assert max(abs(n - 500) for n in gone.values()) < 120  # five standard deviations and a half
