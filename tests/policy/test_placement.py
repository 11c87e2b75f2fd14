"""Where misses are computed: the closed form against every number, the formula against events one after the other."""

import random

import pytest

from core.policy.placement import Costs, Layer, layer_s, to_host


def drawn(seed: int) -> tuple[Costs, Layer]:
    of = random.Random(seed)
    seconds = [10 ** of.uniform(-5, -2) for _ in range(4)]
    fixed = [of.choice((0.0, 10 ** of.uniform(-5, -3))) for _ in range(2)]
    costs = Costs(
        copy_s=seconds[0],
        device_fixed_s=fixed[0],
        device_s=seconds[1],
        device_beside_s=max(seconds[1:3]),
        host_fixed_s=fixed[1],
        host_s=seconds[3],
        threads=(threads := of.randrange(4)),
        gpu=threads > 0 and of.random() < 0.4,
    )
    return costs, Layer(of.randrange(9), of.randrange(1, 33), of.choice((0.0, 10 ** of.uniform(-5, -2))))


def played_s(costs: Costs, layer: Layer, hosted: int) -> float:
    """When a layer is over: what each of the two does, event by event."""
    device_s = costs.device_beside_s if costs.threads and hosted else costs.device_s
    work = device = 0.0  # seconds of the host's threads; when the device is free
    if hosted:
        work = costs.host_fixed_s + sum(costs.host_s for _ in range(hosted))
    device += costs.device_fixed_s
    for _ in range(layer.residents):
        device += device_s
    host_end = work
    if not costs.gpu:
        left = work - device if costs.threads else work
        if left > 0:  # of so many threads, from now on shared by one more
            device += left * costs.threads / (costs.threads + 1) if costs.threads else left
        host_end = 0.0
    link = layer.backlog_s
    for _ in range(layer.misses - hosted):
        link += costs.copy_s
        device = max(device, link) + device_s
    return max(device, host_end)


@pytest.mark.parametrize("seed", range(0, 1000, 250))
def test_the_closed_form_is_the_best_of_all_numbers(seed: int) -> None:
    for one in range(seed, seed + 250):
        costs, layer = drawn(one)
        played = [played_s(costs, layer, n) for n in range(layer.misses + 1)]
        for n, seconds in enumerate(played):
            assert layer_s(costs, layer, n) == pytest.approx(seconds), (one, n)
        assert played[to_host(costs, layer)] == pytest.approx(min(played)), (one, costs, layer)


def test_a_link_that_is_behind_leaves_more_to_the_host() -> None:
    costs = Costs(0.1, 0.0, 0.0, 0.0, 0.0, 0.1)
    counts = [to_host(costs, Layer(0, 8, backlog_s)) for backlog_s in (0.0, 0.2, 0.4, 2.0)]
    assert counts == sorted(counts) and counts[0] == 4 and counts[-1] == 8
