"""What tells a difference between two configurations from its noise: parts of a trace, and runs of passes, by hand."""

import math

import numpy as np
import pytest

from core.measure.evaluate.tally import FEWEST, RUN, ModeTotals
from core.profile.trace import ArrayTrace
from core.simulate import Clock, Config, simulate
from core.simulate.blocks import BLOCKS, Block, block_of, gain
from core.simulate.prefetchers import TimedConfig, timed
from tests.profile.passes import routed, step

CLOCK = Clock(4.0, 1.0, 0.1, 0.0)


def test_parts_are_of_equal_length_and_every_token_is_in_one() -> None:
    at = block_of(np.arange(100), 100)
    assert np.bincount(at).tolist() == [5] * BLOCKS
    assert block_of(np.arange(3), 3).tolist() == [0, 6, 13]


def test_a_gain_and_its_error_by_hand() -> None:
    base = [Block(10, cost) for cost in (5.0, 6.0, 7.0, 8.0, 9.0)]
    less = [Block(10, cost) for cost in (4.0, 4.0, 6.0, 6.0, 8.0)]  # 1, 2, 1, 2, 1 less
    mean, error = gain(less, base) or (0.0, 0.0)
    assert mean == pytest.approx(1.4)
    assert error == pytest.approx(math.sqrt(sum((one - 1.4) ** 2 for one in (1, 2, 1, 2, 1)) / 4 / 5))
    assert gain(base, less) == pytest.approx((-1.4, error))
    assert gain(less[:4], base[:4]) is None, "of four parts no error is told"
    assert gain(less, [*base[:4], Block(9, 9.0)]) is None, "not of the same tokens"
    heavy = [*(Block(1, 1.0) for _ in range(4)), Block(96, 0.0)]
    assert (gain(heavy, [Block(one.tokens, 2.0) for one in heavy]) or (0.0,))[0] == pytest.approx(1.96)


def test_the_parts_of_a_replay_add_up_to_its_result() -> None:
    source = ArrayTrace(routed(47), 9)
    (plain,) = simulate(source, [Config("lru", 9)], clock=CLOCK, processes=1)
    (counted,) = simulate(source, [Config("lru", 9)], processes=1)
    (ahead,) = timed(source, [TimedConfig(Config("lru", 9))], CLOCK, 100, processes=1)
    for found, whole in ((plain, plain.tpot_ms), (counted, counted.misses_per_token), (ahead, ahead.tpot_ms)):
        assert sum(one.tokens for one in found.blocks) == 47 and len(found.blocks) == BLOCKS
        assert sum(one.tokens * one.cost for one in found.blocks) / 47 == pytest.approx(whole)


def test_the_error_of_a_mode_s_time_comes_from_runs_of_passes() -> None:
    tally, rng = ModeTotals(), np.random.default_rng(0)
    took = rng.normal(10.0, 1.0, RUN * FEWEST + 3)
    for at, ms in enumerate(took):
        if at == RUN * FEWEST:
            runs = took[:at].reshape(FEWEST, RUN).mean(1)
            assert tally.total_ms_se == pytest.approx(runs.std(ddof=1) / math.sqrt(FEWEST))
        elif at < RUN * FEWEST:
            assert tally.total_ms_se is None
        one = step(routed(1)[0][:, None])
        one.total_ms = float(ms)
        tally(one)
    assert tally.total_ms_se == pytest.approx(runs.std(ddof=1) / math.sqrt(FEWEST)), (
        "a run that is not whole is left out"
    )
