"""Which of two ways of computing tokens is faster, measured while answers are written.

The ways take turns in blocks of decoded tokens, in the order usual, other, other, usual, and so on, so that what
changes slowly concerns both. The first tokens of a block are not counted: the cache is still as the way before left it.
Times are compared by their logarithms, so that a rare long one weighs little. It ends as soon as the difference exceeds
its noise, within a block of the other way as well, so that few tokens are slower; after both ways had two blocks, once
the other one is no longer ahead; or after MOST blocks. In both of these the usual way stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAD, BLOCK = 2, 8  # tokens at the beginning of a block that are not counted, and those that are
FEWEST = 4  # counted tokens of a way before a difference is believed
LEARNING = 4  # more tokens that are not counted in the first block of the other way, which may have to learn
MOST = 12  # blocks
FUTILE = 4  # blocks after which the other way has to be ahead
SURE = 3.0  # standard errors, more of few tokens: the difference is looked at often, so two would be chance


@dataclass(frozen=True, slots=True)
class Compared:
    """Milliseconds a token in each way, geometric means over so many tokens each, and whether the `other` one is surely
    faster; None = not told apart."""

    usual_ms: float
    other_ms: float
    tokens: int
    faster: bool | None


class Comparison:
    """`other`: the way of the next token. `result`: None until it is over."""

    def __init__(self) -> None:
        self.result: Compared | None = None
        self._logs: tuple[list[float], list[float]] = [], []  # of the milliseconds of tokens: usual, other
        self._blocks, self._passed = 0, 0  # blocks that are over, tokens of the present one

    @property
    def other(self) -> bool:
        """Whether the next token is to be computed in the other way."""
        return self.result is None and self._blocks % 4 in (1, 2)

    @property
    def tried(self) -> bool:
        """Whether a token has been, or is next to be, computed in the other way."""
        return self._blocks > 0

    def note(self, ms: float) -> None:
        """A token was computed in the way that `other` said."""
        lead = LEAD + LEARNING * (self._blocks == 1)
        self._passed += 1
        if self._passed > lead:
            self._logs[self.other].append(math.log(max(ms, 1e-6)))
        ended = self._passed == lead + BLOCK
        if ended:
            self._blocks, self._passed = self._blocks + 1, 0
        if min(map(len, self._logs)) >= FEWEST and (ended or self.other):
            self._judge()

    def _judge(self) -> None:
        usual, other = self._logs
        (low, low_error), (high, high_error) = _mean(usual), _mean(other)
        few = 1 + 2 / min(len(usual), len(other))
        slower, noise = high - low, few * SURE * math.hypot(low_error, high_error)
        sure = abs(slower) > noise
        if sure or self._blocks == MOST or (self._blocks >= FUTILE and slower >= 0):
            faster = slower < 0 if sure else None
            self.result = Compared(math.exp(low), math.exp(high), min(len(usual), len(other)), faster)


def most(values: Sequence[float]) -> float:
    """What the mean of values that are drawn like these surely does not exceed."""
    mean, error = _mean(values)
    return mean + (1 + 2 / len(values)) * SURE * error


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1) / n)
