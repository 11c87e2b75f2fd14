"""Random valid values of settings, from their declarations alone."""

from __future__ import annotations

import math
import random

from core.settings.param import Param, Value
from core.types import ModelShape

FACTOR = 8.0  # numbers without a natural middle are drawn between default / 8 and default * 8


def value(param: Param, shape: ModelShape, dice: random.Random) -> Value:
    """A random value that `param` accepts; it may still need something missing, such as a profile."""
    if param.type == "bool":
        return dice.random() < 0.5
    if param.type == "choice":
        return dice.choice(param.choices)
    if param.type == "text":
        return text(param.name, shape, dice)
    low = param.low if param.low is not None else 0.0
    high = param.high if param.high is not None else max(1.0, float(param.default) * FACTOR)
    default = float(param.default)
    if default > 0 and high / max(low, 1e-9) > FACTOR**2:  # draw wide ranges from around the default
        low, high = max(low, default / FACTOR), min(high, default * FACTOR)
        found = math.exp(dice.uniform(math.log(low), math.log(high)))
    else:
        found = dice.uniform(low, high)
    if param.step:
        found = low + round((found - low) / param.step) * param.step
    found = min(high, max(low, found))
    return math.floor(found) if param.type == "int" else round(found, 6)


def text(name: str, shape: ModelShape, dice: random.Random) -> Value:
    """Text for a field: a budget, a share, or a few experts by layer:expert."""
    if name == "budget":
        return f"{dice.randint(25, 100)}%"
    if name.endswith("alpha"):
        return f"{dice.uniform(0.5, 1.0):.2f}"
    pairs = {(dice.randrange(shape.layers), dice.randrange(shape.experts)) for _ in range(dice.randrange(4))}
    return " ".join(f"{layer}:{expert}" for layer, expert in sorted(pairs))
