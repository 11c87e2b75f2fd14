"""Which sequences are computed together: the token scheduler beside brute force over all partitions."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.batching import NoScheduler, RandomScheduler, Scheduler, TokenScheduler, batch_accuracy, union_size
from core.policy.batching.scheduler import _growth, _packed, in_order
from core.policy.batching.unions import Paths


def drawn(seed: int, n: int, layers: int, experts: int, k: int, kinds: int = 0) -> Paths:
    """Paths of k random experts a layer; of `kinds` kinds of sequences, each with few experts of its own."""
    draw = np.random.default_rng(seed)
    paths = np.zeros((n, layers, experts), np.bool_)
    for one, layer in itertools.product(range(n), range(layers)):
        own = np.arange(experts)
        if kinds:
            part = experts // kinds
            own = own[(one % kinds) * part : (one % kinds + 1) * part]
        paths[one, layer, draw.choice(own, k, replace=False)] = True
    return paths.reshape(n, layers * experts)


def best(paths: Paths, size: int) -> int:
    """The least union of all partitions into two groups of at most `size`."""
    n = len(paths)
    return min(
        union_size(paths, [group, [one for one in range(n) if one not in group]])
        for count in range(max(0, n - size), min(size, n) + 1)
        for group in map(list, itertools.combinations(range(n), count))
    )


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 8),
    spare=st.integers(0, 2),
    k=st.integers(1, 3),
    kinds=st.sampled_from([0, 2]),
)
def test_never_above_the_order_of_arrival_nor_below_the_best(seed: int, n: int, spare: int, k: int, kinds: int) -> None:
    paths, size = drawn(seed, n, 3, 8, k, kinds), (n + 1) // 2 + spare
    groups = TokenScheduler(seed).regroup(paths, size)
    assert sorted(one for group in groups for one in group) == list(range(n))
    assert all(0 < len(group) <= size for group in groups) and len(groups) <= 2
    assert groups == TokenScheduler(seed).regroup(paths, size), "a seed gives one result"
    if len(groups) == 2:
        arrival = union_size(paths, NoScheduler().regroup(paths, size))
        assert best(paths, size) <= union_size(paths, groups) <= arrival


def test_it_finds_the_two_kinds_of_sequences() -> None:
    """They alternate as they arrive, which is the worst order."""
    paths = drawn(1, 16, 4, 16, 3, kinds=2)
    groups = TokenScheduler().regroup(paths, 8)
    assert sorted(groups) == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert union_size(paths, groups) * 1.8 < union_size(paths, NoScheduler().regroup(paths, 8))


def test_the_optimum_of_the_papers_figure_4_from_every_start() -> None:
    """Eight sequences of one expert each, four experts: two batches of four need two experts each."""
    for seed in range(200):
        paths = np.eye(4, dtype=np.bool_)[np.random.default_rng(seed).permutation(8) % 4]
        assert union_size(paths, TokenScheduler(seed).regroup(paths, 4)) == 4


@given(seed=st.integers(0, 10_000), n=st.integers(3, 20), experts=st.integers(1, 70))
def test_exchanges_never_lose_what_clustering_found(seed: int, n: int, experts: int) -> None:
    paths, size = drawn(seed, n, 2, experts, min(3, experts)), (n + 1) // 2
    scheduler, bits = TokenScheduler(seed), _packed(paths)
    clustered = scheduler._clustered(bits, paths.shape[1], in_order(n, size), size)
    exchanged = scheduler._exchanged(bits, clustered, size)
    assert union_size(paths, exchanged) <= union_size(paths, clustered)
    grows = _growth(bits, *clustered)
    for i, j in itertools.product(*map(range, map(len, clustered))):
        one, other = (list(group) for group in clustered)
        one[i], other[j] = other[j], one[i]
        assert union_size(paths, [one, other]) - union_size(paths, clustered) == grows[i, j]


def test_it_is_near_the_best_of_all_partitions_where_there_is_something_to_find() -> None:
    """Mean over 40 draws of 8 sequences: of the saving that brute force finds, at least 95 % where there are kinds."""
    saved, possible = 0, 0
    for seed in range(40):
        paths = drawn(seed, 8, 4, 16, 2, kinds=2)[np.random.default_rng(seed).permutation(8)]
        arrival = union_size(paths, NoScheduler().regroup(paths, 4))
        saved += arrival - union_size(paths, TokenScheduler(seed).regroup(paths, 4))
        possible += arrival - best(paths, 4)
    assert saved >= 0.95 * possible > 0


@pytest.mark.parametrize("scheduler", [NoScheduler(), RandomScheduler(3), TokenScheduler()])
@pytest.mark.parametrize(("n", "size"), [(0, 4), (3, 4), (4, 4), (7, 4), (8, 4)])
def test_batches_that_are_not_full(scheduler: Scheduler, n: int, size: int) -> None:
    groups = scheduler.regroup(drawn(2, n, 2, 8, 2), size)
    assert sorted(itertools.chain(*groups)) == list(range(n)) and len(groups) == -(-n // size)
    with pytest.raises(ValueError, match="two batches"):
        scheduler.regroup(drawn(2, 9, 2, 8, 2), 4)


def test_all_the_same_and_none_at_all() -> None:
    for paths in (np.ones((6, 8), np.bool_), np.zeros((6, 8), np.bool_)):
        assert sorted(map(len, TokenScheduler().regroup(paths, 3))) == [3, 3]


def unions(*layers: Sequence[int]) -> np.ndarray:
    found = np.zeros((len(layers), 8), np.bool_)
    for layer, experts in enumerate(layers):
        found[layer, list(experts)] = True
    return found


def test_the_accuracy_of_a_batch() -> None:
    """Two of three, and one of two: (2/3 + 1/2) / 2. What is predicted in vain costs no accuracy."""
    assert batch_accuracy(unions([1, 2, 3], [4, 5]), unions([2, 3, 7], [5, 6])) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert batch_accuracy(unions([1], []), unions([1], [2])) == 1.0
    assert np.isnan(batch_accuracy(unions([]), unions([1])))


def test_the_union_of_groups() -> None:
    paths = np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]], np.bool_)
    assert union_size(paths, [[0, 1], [2]]) == 3 + 2 and union_size(paths, [[0, 1, 2]]) == 4
