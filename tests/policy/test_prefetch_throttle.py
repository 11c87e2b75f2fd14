"""Prefetching that does not pay is paused, is tried again, and goes on when it pays."""

import numpy as np
import pytest

from core.policy.prefetch.throttle import LONGEST, REST, WINDOW, PrefetchThrottle
from core.types import StepRecord


def step(net_ms: float, phase: str = "decode", total_ms: float = 10.0) -> StepRecord:
    none = np.zeros(0, np.int16)
    return StepRecord(
        0,
        phase,
        1,
        0.0,
        total_ms,
        1.0,
        0.0,
        0.0,
        0.0,
        none,
        none,
        none,  # type: ignore[arg-type]
        none.astype(np.uint8),
        net_ms=net_ms,
    )


def throttle() -> tuple[PrefetchThrottle, list[str]]:
    one, said = PrefetchThrottle(), list[str]()
    one.enabled, one.say = True, said.append
    return one, said


def feed(one: PrefetchThrottle, count: int, net_ms: float) -> None:
    for _ in range(count):
        one.note(step(net_ms))


def test_a_loss_pauses_and_a_trial_that_pays_goes_on() -> None:
    one, said = throttle()
    feed(one, 2 * WINDOW - 1, -1.0)  # the first window is for learning
    assert not one.paused
    feed(one, 1, -1.0)
    assert one.paused and "paused: it cost 1.00 ms a token more" in said[0] and str(REST) in said[0]
    feed(one, REST - 1, 0.0)
    assert one.paused
    feed(one, 1, 0.0)
    assert not one.paused and said[1:] == ["prefetching is tried again"]
    feed(one, 2 * WINDOW, 0.1)
    assert not one.paused and len(said) == 2
    feed(one, WINDOW, -1.0)
    assert one.paused and f"in {REST} tokens" in said[2]  # it had paid meanwhile: the pause is short again


def test_what_is_near_nothing_neither_stops_it_nor_brings_it_back() -> None:
    one, said = throttle()
    feed(one, 10 * WINDOW, -0.19)  # less than 2 % of 10 ms
    assert not one.paused and not said
    feed(one, WINDOW, -0.5)
    assert one.paused
    feed(one, REST, 0.0)
    feed(one, 2 * WINDOW, -0.01)  # in a trial any loss is one
    assert one.paused and f"in {2 * REST} tokens" in said[-1]


def test_pauses_grow_up_to_a_limit() -> None:
    one, said = throttle()
    feed(one, 40 * LONGEST, -1.0)
    rests = [int(text.split(" in ")[1].split()[0]) for text in said if "paused" in text]
    assert rests[:3] == [REST, 2 * REST, 4 * REST] and rests[-1] == max(rests) == LONGEST


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_decoded_tokens_count_and_it_pauses_only_when_it_is_on(phase: str) -> None:
    one, said = throttle()
    one.enabled = phase == "prefill"
    for _ in range(5 * WINDOW):
        one.note(step(-5.0, phase))
    told = ["prefetching costs 5.00 ms a token more than it saves; with prefetch_auto it would pause"]
    assert not one.paused and said == (told if phase == "decode" else [])
    one.enabled = True
    feed(one, WINDOW, -5.0)
    assert one.paused is (phase == "decode")


def test_another_setting_ends_a_pause() -> None:
    one, _ = throttle()
    feed(one, 2 * WINDOW, -1.0)
    assert one.paused
    one.restart()
    assert not one.paused
    feed(one, 2 * WINDOW - 1, -1.0)
    assert not one.paused
