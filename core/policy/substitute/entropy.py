"""TAE, the entropy of a token's gate weights, in one place: for what is decided, for what is recorded, for profiles."""

from collections.abc import Sequence
from math import log
from typing import Any, TypeVar

import numpy as np

Array = TypeVar("Array")
TEMPERATURES = (0.8, 0.9, 1.0, 1.1, 1.2)  # those that a profile has percentiles at: the paper's range of them


def entropy(weights: Array, temperature: float = 1.0, xp: Any = np) -> Array:
    """TAE fp64 [...] = -sum g log g / log k of gate weights fp64 [..., k] renormalised (BuddyMoE section 3.1, eq. 1):
    0 = one expert has everything, 1 = all have the same. A temperature T makes them g^(1/T), renormalised: the softmax
    of logits / T over the same experts. `xp`: numpy or torch, whichever the array is of."""
    wide: Any = weights
    shares: Any = renormalised(wide if temperature == 1.0 else wide ** (1.0 / temperature), xp)
    logs = xp.log(xp.where(shares > 0, shares, 1.0))
    found: Array = xp.clip(-(shares * logs).sum(-1) / max(float(np.log(wide.shape[-1])), 1e-30), 0.0, 1.0)
    return found


def renormalised(weights: Array, xp: Any = np) -> Array:
    """Weights fp64 [..., k] that add up to 1 for each token; those that are all 0 stay."""
    wide: Any = weights
    found: Array = wide / xp.clip(wide.sum(-1, keepdims=True), 1e-30, None)
    return found


def entropy_of_token(weights: Sequence[float], temperature: float = 1.0) -> float:
    """The same of one token's weights [k], on Python numbers: for so few, arrays take seven times as long."""
    if temperature != 1.0:
        weights = [weight ** (1.0 / temperature) for weight in weights]
    whole = sum(weights)
    if whole <= 0.0 or len(weights) < 2:
        return 0.0
    logs = 0.0
    for weight in weights:
        if weight > 0.0:
            logs += weight * log(weight / whole)
    return min(1.0, max(0.0, -logs / whole / log(len(weights))))
