"""What passes measure chooses: who leads a GPU's tokens, where misses are computed, and the number of threads."""

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from core.memory.codec.native import threads as native
from core.policy.placement import Costs, Layer
from core.runtime.lead import FIRST, OFTEN, TRIED, Lead
from core.runtime.placement import PROBED, WEIGHED, PlacementCosts
from core.runtime.placement_trials import LayerTrial, Seen, line, trial_costs
from core.runtime.warmup import Split, Threads, choose_threads
from tests.threads import torch_threads


def run(lead: Lead, tokens: int, seconds: Callable[[bool], float]) -> tuple[list[bool], float]:
    """Who led each token, and the time of all."""
    led, spent_s = [], 0.0
    for _ in range(tokens):
        by_gpu = lead.next
        led.append(by_gpu)
        lead.took(by_gpu, seconds(by_gpu))
        spent_s += seconds(by_gpu)
    return led, spent_s


def test_a_graph_that_is_much_faster_leads_nearly_all_tokens() -> None:
    led, spent_s = run(Lead(), 4000, lambda by_gpu: 6e-3 if by_gpu else 45e-3)
    assert led[:FIRST] == [True] * FIRST and led[FIRST : FIRST + TRIED] == [False] * TRIED
    assert led.count(False) <= 7 * TRIED and spent_s < 1.03 * 4000 * 6e-3


def test_the_host_leads_where_it_is_faster() -> None:
    led, spent_s = run(Lead(), 1000, lambda by_gpu: 30e-3 if by_gpu else 20e-3)
    assert not any(led[FIRST : FIRST + OFTEN])
    assert spent_s < 1.03 * 1000 * 20e-3


@pytest.mark.parametrize("first", [True, False])
def test_what_becomes_faster_leads_soon(first: bool) -> None:
    lead = Lead()
    run(lead, 400, lambda by_gpu: 10e-3 if by_gpu == first else 14e-3)
    assert lead.by_gpu == first
    run(lead, 2 * OFTEN, lambda by_gpu: 14e-3 if by_gpu == first else 10e-3)
    assert lead.by_gpu != first


def test_one_slow_token_decides_nothing() -> None:
    """A token that something else held up, in each way."""
    lead, slow = Lead(), iter([False] * 10 + [True] + [False] * (FIRST - 10 - 1) + [True] + [False] * 2000)
    run(lead, 600, lambda by_gpu: (6e-3 if by_gpu else 9e-3) + (0.2 if next(slow) else 0.0))
    assert lead.by_gpu


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


def test_threads_that_save_less_than_handing_over_takes_are_given_up() -> None:
    kept = PlacementCosts(Costs(1.0, 0.0, 0.0002, 0.0002, 0.0, 0.0002, threads=1, gpu=False))
    for handing_s, given_up in ((0.0, False), (0.001, True)):
        kept.costs.host_fixed_s = handing_s
        for _ in range(WEIGHED - 1):
            assert kept.choose(Layer(3, 1), 0.0) == 1
        assert not kept.alone(), "too few layers"
        kept.choose(Layer(3, 1), 0.0)
        assert kept.alone() == kept.alike == given_up
    assert kept.costs == Costs(1.0, 0.0, 0.0002, 0.0002, 0.0, 0.0002, threads=0, gpu=False)


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


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    with torch_threads(4):
        yield


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({1: 5.0, 2: 6.0, 4: 9.0}, 1),
        ({1: 9.0, 2: 5.0, 4: 6.0}, 2),
        ({1: 9.0, 2: 7.0, 4: 4.0}, 4),
        ({1: 5.0, 2: 4.9, 4: 4.86}, 1),
    ],
)
def test_the_fastest_is_taken_and_torch_left_as_it_was(times: dict[int, float], best: int) -> None:
    threads, pass_ms = choose_threads(CPU, 0, lambda: times[torch.get_num_threads()])
    assert (threads.token, pass_ms) == ((best, native.TORCHS), times[best])
    assert torch.get_num_threads() == 4


def test_what_is_asked_for_is_taken_and_a_gpu_is_not_timed() -> None:
    threads, pass_ms = choose_threads(CPU, 3, lambda: float(torch.get_num_threads()))
    assert (threads.token, pass_ms) == ((3, native.TORCHS), 3.0)
    assert choose_threads(torch.device("cuda"), 0, lambda: 1 / 0)[1] == 0.0


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({(1, 0): 9.0, (2, 0): 8.0, (1, 2): 6.0, (4, 0): 7.0, (1, 4): 5.0}, (1, 4)),
        ({(1, 0): 9.0, (2, 0): 6.0, (1, 2): 7.0, (4, 0): 9.0, (1, 4): 9.0}, (2, 0)),
        ({(1, 0): 9.0, (2, 0): 8.0, (1, 2): 7.9, (4, 0): 9.0, (1, 4): 7.8}, (1, 2)),
    ],
)
def test_where_steps_of_our_own_compute_these_may_have_the_threads(
    times: dict[tuple[int, int], float], best: tuple[int, int]
) -> None:
    threads, pass_ms = choose_threads(CPU, 0, lambda: times[torch.get_num_threads(), native.shared_by()], ours=True)
    assert (threads.token, threads.token.most, pass_ms) == (best, max(best), times[best])
    assert (torch.get_num_threads(), native.shared_by()) == (4, 1)
    assert choose_threads(CPU, 4, lambda: times[torch.get_num_threads(), native.shared_by()], ours=True)[0].token in (
        (4, 0),
        (1, 4),
    )


def test_a_prompt_is_read_with_all_and_a_token_decoded_with_the_chosen() -> None:
    threads = Threads(Split(2))
    threads.use("decode")
    assert (torch.get_num_threads(), native.shared_by()) == (2, native.TORCHS)
    threads.use("prefill")
    assert (torch.get_num_threads(), native.shared_by()) == (4, native.TORCHS)
    threads.use("prefill", tokens=3)
    assert (torch.get_num_threads(), native.shared_by()) == (4, native.TORCHS)
