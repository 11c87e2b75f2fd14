"""One contract for every registered eviction policy, and an independent oracle for each of those that have one."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.eviction import GONE, Eviction, ExpertIndex, victim
from core.policy.eviction.class_lru import ClassLRU
from core.policy.eviction.lfru import LFRU
from core.policy.hints import Hints
from core.settings.config import Settings
from core.settings.registry import create, variants

NAMES = [v.name for v in variants("eviction")]
LAYERS, EXPERTS = 3, 4
SIZE = LAYERS * EXPERTS
traces = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=200)


def make(name: str, hints: Hints | None = None, experts: int = EXPERTS, **params: float) -> Eviction:
    policy: Eviction = create("eviction", name, params, expert_index=ExpertIndex(LAYERS, experts, hints=hints))
    return policy


def replay(policy: Eviction, trace: Sequence[int], capacity: int) -> list[int | None]:
    """Drive a policy as a cache shared by all layers does; per access the expert that left, or None."""
    whole, residents = slice(0, policy.expert_index.size), set[int]()
    left: list[int | None] = []
    for now, eid in enumerate(trace):
        gone = None
        if eid not in residents:
            if len(residents) == capacity:
                gone = victim(policy, whole, now, eid // policy.expert_index.experts, {eid})
                assert gone in residents
                policy.left(gone)
                residents.remove(gone)
            policy.admitted(eid, now, now)
            residents.add(eid)
        policy.used(eid, now, now)
        left.append(gone)
        assert len(residents) <= capacity
    assert np.flatnonzero(policy.score != GONE).tolist() == sorted(residents)
    return left


@pytest.mark.parametrize("name", NAMES)
@given(trace=traces, capacity=st.integers(1, 6))
def test_the_victim_is_a_resident_and_choices_repeat(name: str, trace: list[int], capacity: int) -> None:
    assert replay(make(name), trace, capacity) == replay(make(name), trace, capacity)


@pytest.mark.parametrize("name", NAMES)
@given(trace=traces, blocked=st.sets(st.integers(0, SIZE - 1)), layer=st.integers(0, LAYERS - 1))
def test_a_blocked_expert_never_leaves(name: str, trace: list[int], blocked: set[int], layer: int) -> None:
    policy = make(name)
    for now, eid in enumerate(dict.fromkeys(trace)):
        policy.admitted(eid, now, now)
        policy.used(eid, now, now)
    before = policy.score.copy()
    for part in (slice(0, SIZE), slice(4, 8)):
        free = set(trace) & set(range(part.start, part.stop)) - blocked
        gone = victim(policy, part, 999, layer, blocked, ())
        assert gone in free if free else gone is None
    assert (policy.score == before).all()  # asking changes nothing


@pytest.mark.parametrize("name", NAMES)
@given(trace=traces)
def test_many_ids_at_once_are_one_after_the_other(name: str, trace: list[int]) -> None:
    one, many = make(name), make(name)
    for now in range(0, len(trace), 3):
        ids = list(dict.fromkeys(trace[now : now + 3]))
        ticks = list(range(now, now + len(ids)))
        new = [(e, t) for e, t in zip(ids, ticks, strict=True) if one.score[e] == GONE]
        for eid, tick in new:
            one.admitted(eid, tick, now)
        for eid, tick in zip(ids, ticks, strict=True):
            one.used(eid, tick, now)
        if new:
            many.admitted(*np.array(new).T, now)
        many.used(np.array(ids), np.array(ticks), now)
        if now % 2:
            one.left(ids[0])
            many.left(np.array(ids[:1]))
        whole = slice(0, SIZE)
        assert (one.scores(whole, now, 1) == many.scores(whole, now, 1)).all()
        by_layer = many.scores(whole, now, many.expert_index.layer_of)
        for layer in range(LAYERS):
            part = slice(layer * EXPERTS, (layer + 1) * EXPERTS)
            assert (by_layer[part] == one.scores(part, now, layer)).all()


def test_the_lowest_id_leaves_among_equals() -> None:
    policy = make("finemoe")
    for eid in (7, 2, 5):
        policy.admitted(eid, 0, 0)
    assert victim(policy, slice(0, SIZE), 0, 0) == 2
    assert victim(policy, slice(0, SIZE), 0, 0, {2}) == 5


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


def lru(trace: Sequence[int], capacity: int) -> list[int | None]:
    order: OrderedDict[int, None] = OrderedDict()
    left: list[int | None] = []
    for eid in trace:
        missing = eid not in order
        left.append(order.popitem(last=False)[0] if missing and len(order) == capacity else None)
        order[eid] = None
        order.move_to_end(eid)
    return left


def fifo(trace: Sequence[int], capacity: int) -> list[int | None]:
    queue: deque[int] = deque()
    left: list[int | None] = []
    for eid in trace:
        missing = eid not in queue
        left.append(queue.popleft() if missing and len(queue) == capacity else None)
        if missing:
            queue.append(eid)
    return left


def lowest(trace: Sequence[int], capacity: int, worth: Callable[[int, int, int, int], Any]) -> list[int | None]:
    """Whoever is worth least leaves, by its uses, its last one, the present, and its id."""
    count: Counter[int] = Counter()
    last: dict[int, int] = {}
    residents: set[int] = set()
    left: list[int | None] = []
    for now, eid in enumerate(trace):
        gone = None
        if eid not in residents and len(residents) == capacity:
            gone = min(residents, key=lambda e: worth(count[e], last[e], now, e))
            residents.remove(gone)
        residents.add(eid)
        count[eid] += 1
        last[eid] = now
        left.append(gone)
    return left


def lfu(trace: Sequence[int], capacity: int) -> list[int | None]:
    return lowest(trace, capacity, lambda uses, last, now, eid: (uses, last))


ORACLES: dict[str, Callable[[Sequence[int], int], list[int | None]]] = {"lru": lru, "fifo": fifo, "lfu": lfu}


@pytest.mark.parametrize("name", ORACLES)
@given(trace=traces, capacity=st.integers(1, 6))
def test_against_the_definition(name: str, trace: list[int], capacity: int) -> None:
    assert replay(make(name), trace, capacity) == ORACLES[name](trace, capacity)


@given(trace=traces, capacity=st.integers(1, 6))
def test_lcp_against_its_formula(trace: list[int], capacity: int) -> None:
    """P = mu x rho^(nu / omega), with rho = 1/4 and omega = 8: exact in binary, so that ties are ties."""
    left = lowest(trace, capacity, lambda uses, last, now, eid: (round(np.log2(uses) - 2 * (now - last) / 8, 9), eid))
    assert replay(make("lcp", rho=0.25, omega=8), trace, capacity) == left


@given(trace=traces, capacity=st.integers(1, 6), half_life=st.integers(1, 9))
def test_lfru_against_its_formula(trace: list[int], capacity: int, half_life: int) -> None:
    left = lowest(trace, capacity, lambda uses, last, now, eid: (uses / (1 + Fraction(now - last, half_life)), eid))
    assert replay(LFRU(ExpertIndex(LAYERS, EXPERTS), half_life), trace, capacity) == left


@given(trace=traces, capacity=st.integers(1, 6), half_life=st.integers(1, 9), classes=st.integers(1, 4))
def test_class_lru_against_its_lists(trace: list[int], capacity: int, half_life: int, classes: int) -> None:
    """One list for each class, in the order of the last use: of their heads, the one that is oldest for its class
    leaves. The clock counts layers, a token LAYERS of them."""
    lists: list[list[int]] = [[] for _ in range(classes)]
    uses: list[list[int]] = [[] for _ in range(SIZE)]  # when, also before an eviction
    left: list[int | None] = []
    for now, eid in enumerate(trace):
        held, gone = [one for some in lists for one in some], None
        if eid not in held and len(held) == capacity:
            heads = [(number, some[0]) for number, some in enumerate(lists) if some]

            def age(head: tuple[int, int], now: int = now, layer: int = eid // EXPERTS) -> tuple[Fraction, int]:
                number, one = head
                layers = (now - uses[one][-1]) * LAYERS + layer - one // EXPERTS
                return Fraction(layers, 2**number), -one

            number, gone = max(heads, key=age)
            lists[number].remove(gone)
        for some in lists:
            if eid in some:
                some.remove(eid)
        uses[eid].append(now)
        crf = sum(2.0 ** (-(now - one) / half_life) for one in uses[eid])
        lists[min(classes - 1, int(np.floor(np.log2(crf + 1e-12))))].append(eid)
        left.append(gone)
    assert replay(ClassLRU(ExpertIndex(LAYERS, EXPERTS), half_life, classes), trace, capacity) == left
