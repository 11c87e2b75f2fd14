"""What was saved, by hand and against the engine's own exact cache."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from core.cache.pool import Pool
from core.engine import Engine
from core.engine.quality.saved import Shadow, Waits, spared
from core.policy.eviction import Eviction, ExpertIndex
from core.policy.eviction.lfu import LFU
from core.policy.eviction.lru import LRU
from core.policy.eviction.none import NoCache
from core.types import Outcome, StepRecord
from tests.engine.quality.conftest import say
from tests.selection import layered

HIT, BROUGHT, PARTIAL_HIT, MISS, DISK = (
    Outcome.HIT,
    Outcome.PREFETCH_HIT,
    Outcome.PARTIAL_HIT,
    Outcome.MISS,
    Outcome.MISS_DISK,
)
OTHER, NONE, NAMED = Outcome.SUBSTITUTED, Outcome.DROPPED, Outcome.PREDICTED


def step(phase: str, stall_ms: float, *requests: tuple[int, int, Outcome]) -> StepRecord:
    """(layer, expert, outcome) of each request."""
    layer, expert, outcome = np.array(requests, np.int16).reshape(-1, 3).T
    return StepRecord(
        0,
        phase,
        1,
        0.0,
        10.0,
        10.0 - stall_ms,
        stall_ms,
        0.0,
        0.0,
        np.zeros((2, 1, 1), np.int16),
        layer,  # type: ignore[arg-type]
        expert,
        outcome.astype(np.uint8),
    )


@dataclass
class TwoPools:
    """Two layers of four experts, two slots each, and `transit` set aside."""

    layers: int = 2
    experts: int = 4
    make_policy: Callable[[ExpertIndex], Eviction] = LRU
    transit: int = 0
    pools: list[Pool] = field(default_factory=lambda: [Pool(slice(0, 4), 2), Pool(slice(4, 8), 2)])

    def pool(self, layer: int) -> Pool:
        return self.pools[layer]


def test_what_a_miss_costs_is_what_was_waited_for() -> None:
    waits = Waits(lambda: 7.0)
    waits.note([step("prefill", 9.0, (0, 0, MISS)), step("decode", 0.0, (0, 0, HIT), (0, 1, NONE))])
    assert waits.wait_ms() == 7.0, "nothing was waited for yet: the link's own time"
    waits.note(
        [
            step("decode", 6.0, (0, 0, MISS), (0, 1, DISK), (1, 0, HIT)),
            step("decode", 2.0, (0, 0, PARTIAL_HIT), (1, 1, MISS)),
        ]
    )
    assert waits.wait_ms() == pytest.approx(8.0 / 4), "prompts and what did not wait do not count"


def test_an_expert_missing_again_and_again_is_counted_once() -> None:
    steps = [
        step("prefill", 0.0, (0, 0, HIT), (0, 1, HIT), (1, 0, HIT)),
        step("decode", 0.0, (0, 2, NONE)),  # an exact cache fetches it ...
        step("decode", 0.0, (0, 2, NONE)),  # ... and has it
        step("decode", 0.0, (0, 2, OTHER)),
        step("decode", 0.0, (0, 0, HIT)),  # it has lost this one to it: a miss that the lossy one has not
        step("decode", 0.0, (1, 0, HIT)),
    ]
    assert spared(steps, Shadow(TwoPools())) == pytest.approx(2 / 5)


def test_what_was_waited_for_or_brought_ahead_is_not_saved() -> None:
    steps = [
        step("decode", 0.0, (0, 0, MISS), (1, 0, NAMED)),
        step("decode", 0.0, (0, 1, BROUGHT), (1, 1, PARTIAL_HIT)),
        step("decode", 0.0, (0, 2, DISK), (1, 2, NONE)),
    ]
    assert spared(steps, Shadow(TwoPools())) == pytest.approx((0 + 1 + 0 + 0 + 0 + 1) / 3)
    thrifty = [step("prefill", 0.0, (0, 0, HIT)), step("decode", 0.0, (0, 0, MISS))]  # fetched, though it was there
    assert spared(thrifty, Shadow(TwoPools())) == -1.0


def test_a_cache_that_keeps_nothing_misses_everything() -> None:
    steps = [step("decode", 0.0, (0, 0, NONE), (1, 3, NONE)), step("decode", 0.0, (0, 0, NONE), (1, 3, NONE))]
    assert spared(steps, Shadow(TwoPools(make_policy=NoCache))) == 2.0
    assert spared(steps, Shadow(TwoPools())) == 1.0


def test_with_bypass_an_expert_that_is_not_kept_is_missed_again() -> None:
    steps = [
        *(step("decode", 0.0, (0, 0, HIT), (0, 1, HIT)) for _ in range(3)),
        step("decode", 0.0, (0, 2, NONE)),
        step("decode", 0.0, (0, 2, NONE)),
        step("decode", 0.0, (0, 0, HIT), (0, 1, HIT)),
    ]
    for transit, missed in ((0, [2, 0, 0, 1, 0, 1]), (1, [2, 0, 0, 1, 1, 0])):
        shadow = Shadow(TwoPools(make_policy=LFU, transit=transit))
        assert [int(shadow.read(one).sum()) for one in steps] == missed


def test_more_than_a_pool_holds_and_nothing_decoded() -> None:
    crowd = step("prefill", 0.0, *((0, expert, HIT) for expert in range(4)))
    shadow = Shadow(TwoPools())
    assert shadow.read(crowd).tolist() == [True] * 4
    assert shadow.read(crowd).sum() >= 2
    assert spared([crowd], Shadow(TwoPools())) is None
    assert spared([step("decode", 0.0)], Shadow(TwoPools())) is None, "nothing was recorded"


@pytest.mark.parametrize(
    "changes",
    layered(
        [
            {"eviction": "lru"},
            {"eviction": "lfu", "scope": "global"},
            {"eviction": "none"},
            {"eviction": "lfu", "bypass": True},
        ],
        quick=lambda changes: len(changes) == 2,
    ),
)
def test_an_exact_answer_saves_nothing(engine: Engine, changes: dict[str, object]) -> None:
    """The shadow misses what the engine's exact cache misses, once the prompt has filled both with the same."""
    engine.change({"miss": "wait", **changes})
    engine.expert_cache.clear()  # empty, as the shadow is
    engine.expert_cache.reshape(scope=str(engine.settings["scope"]), make_policy=engine.expert_cache.make_policy)
    _, stats, steps = say(engine, 40, "hi")
    assert stats.exact
    shadow = Shadow(engine.expert_cache)
    missed = [shadow.read(one) for one in steps]
    decode = [(m, one.outcome == Outcome.MISS) for m, one in zip(missed, steps, strict=True) if one.phase == "decode"]
    agree = sum(int((m == real).sum()) for m, real in decode) / sum(m.size for m, _ in decode)
    assert agree > 0.97
    assert abs(sum(int(m.sum()) - int(real.sum()) for m, real in decode)) <= 0.03 * sum(m.size for m, _ in decode)
