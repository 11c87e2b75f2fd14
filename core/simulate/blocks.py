"""Costs of consecutive parts of a trace: what says how much of a difference between two configurations is noise.

Two configurations replay the same tokens, so they are compared part by part. Tokens beside each other are alike, and so
are their costs; parts of a twentieth of the trace are nearly independent (batch means, Law and Kelton chapter 9)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCKS = 20  # parts of a trace
FEWEST = 5  # parts with tokens below which no error is told


class Block(NamedTuple):
    """One part: its decoded tokens, and what each of them cost on average."""

    tokens: int
    cost: float


def block_of(token: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
    """Which part of a trace of so many `tokens` each of these positions is in."""
    return np.minimum(token * BLOCKS // max(1, tokens), BLOCKS - 1)


def gain(of: Sequence[Block], over: Sequence[Block]) -> tuple[float, float] | None:
    """(how much less a token costs in `of` than in `over`, the standard error of that); None where both are not of the
    same tokens, or too few."""
    pairs = [(a.tokens, b.cost - a.cost) for a, b in zip(of, over, strict=False) if a.tokens]
    if len(of) != len(over) or any(a.tokens != b.tokens for a, b in zip(of, over, strict=True)) or len(pairs) < FEWEST:
        return None
    whole, n = sum(tokens for tokens, _ in pairs), len(pairs)
    mean = sum(tokens * less for tokens, less in pairs) / whole
    squares = sum((tokens * (less - mean)) ** 2 for tokens, less in pairs)
    return mean, math.sqrt(squares * n / (n - 1)) / whole
