"""Who leads a GPU's tokens by default: the faster way is found, also when it changes, and trying costs little."""

from collections.abc import Callable

import pytest

from core.runtime.lead import FIRST, OFTEN, TRIED, Lead


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
