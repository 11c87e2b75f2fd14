"""The costs of placement follow what passes measure, and are tried again where the host computes nothing."""

from typing import cast

import pytest
import torch

from core.policy.placement import Costs, Layer
from core.runtime.placement import PROBED, PlacementCosts
from core.runtime.placement_trials import LayerTrial, Seen, line, trial_costs

COSTS = Costs(0.001, 0.0001, 0.0002, 0.0003, 0.0001, 0.0004, threads=1, gpu=False)


def test_averages_move_to_what_is_measured_and_not_to_one_outlier() -> None:
    kept = PlacementCosts(COSTS)
    kept.hosted(10.0, 1)
    assert kept.costs.host_s < 1.2 * COSTS.host_s
    for _ in range(200):
        kept.hosted(8 * 0.001, 8)
        kept.handed(0.0002)
        kept.computed(0.0001 + 4 * 0.0005, 4, beside=True)
        kept.computed(0.0001 + 4 * 0.0004, 4, beside=False)
    assert kept.costs.host_s == pytest.approx(0.001, rel=0.01)
    assert kept.costs.host_fixed_s == pytest.approx(0.0002, rel=0.01)
    assert kept.costs.device_beside_s == pytest.approx(0.0005, rel=0.01)
    assert kept.costs.device_s == pytest.approx(0.0004, rel=0.01)


def test_the_computing_thread_computes_both_alike() -> None:
    kept = PlacementCosts(Costs(0.001, 0.0, 0.0002, 0.0002, 0.0, 0.0002, threads=0, gpu=False))
    kept.computed(4 * 0.0003, 4, beside=False)
    assert kept.costs.host_s == kept.costs.device_s > 0.0002


def test_where_both_are_computed_alike_no_expert_waits() -> None:
    kept = PlacementCosts(Costs(1e-9, 0.0, 0.0002, 0.0002, 0.0, 0.0002, threads=0, gpu=False))
    assert kept.alike and kept.choose(Layer(4, 8), 0.0) == 8
    assert not PlacementCosts(COSTS).alike


def test_a_slower_link_sends_more_to_the_host() -> None:
    kept = PlacementCosts(COSTS)
    counts = [kept.choose(Layer(4, 8), copy_s) for copy_s in (0.00001, 0.0004, 0.01)]
    assert counts == sorted(counts) and counts[-1] == 8


def test_the_host_is_tried_now_and_then_where_it_would_compute_nothing() -> None:
    kept = PlacementCosts(Costs(0.00001, 0.0, 0.0002, 0.0002, 1.0, 1.0))
    counts = [kept.choose(Layer(4, 8), 0.0) for _ in range(3 * PROBED)]
    assert counts.count(1) == 3 and counts.count(0) == 3 * PROBED - 3


def test_fixed_and_each_of_two_measurements() -> None:
    assert line([0.003, 0.010], 8) == pytest.approx((0.002, 0.001))
    assert line([0.003, 0.003], 1) == pytest.approx((0.0, 0.003))
    fixed_s, each_s = line([0.003, 0.001], 8)  # noise
    assert fixed_s >= 0 < each_s


@pytest.mark.parametrize(
    ("device", "beside_ms", "hand_ms", "threads"),
    [
        ("cpu", 0.2, 0.01, 1),  # a processor of its own: two experts at once
        ("cpu", 0.4, 0.01, 0),  # the same processors: each takes twice as long
        ("cpu", 0.2, 3.0, 0),  # handing over takes longer than computing
        ("cuda", 0.4, 3.0, 1),  # a GPU's host computes with its threads, or not at all
    ],
)
def test_threads_of_the_host_are_used_where_they_are_measured_to_be_faster(
    device: str, beside_ms: float, hand_ms: float, threads: int
) -> None:
    class Trial:
        most = 8

        def __init__(self) -> None:
            self.device = torch.device(device)

        def usual(self, here: int, hosted: int) -> Seen:
            each_s = (beside_ms if hosted else 0.2) / 1e3
            return Seen(here * each_s, hosted * each_s, hand_ms / 1e3)

    costs = trial_costs(cast(LayerTrial, Trial()), 1.0, 1)
    assert costs.threads == threads and costs.copy_s == 1.0
