"""A plan of the cache as a value: slots and split of every layer, and the time that the latency model expects of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from core.policy.allocation.expert_split import LayerTimes, Split

Numbers = tuple[float, ...]


class LayerBlocks(NamedTuple):
    """A layer of a plan in whole blocks of its experts."""

    capacity: int  # blocks that the layer may keep
    top: int  # blocks of an expert's top; 0: the layer keeps nothing


@dataclass(frozen=True, slots=True)
class CachePlan:
    """One entry a layer. `slots`: whole experts' worth of the budget; `cached` experts have their first `theta`
    resident; `exposed_ms` of a token's time is waiting for the layer's copies. `compute_ms`: of a token, everything
    resident. `rounds`: moves of budget that led here from even shares."""

    slots: Numbers
    cached: tuple[int, ...]
    theta: Numbers
    exposed_ms: Numbers
    compute_ms: float
    rounds: int = 0

    @classmethod
    def of(cls, slots: Any, split: Split, times: LayerTimes, rounds: int = 0) -> CachePlan:
        """The first alternative of a split of `slots` [N, L]."""
        rows = (one[0].tolist() for one in (slots, split.cached, split.theta, split.exposed_ms))
        numbers, cached, theta, exposed_ms = map(tuple, rows)
        return cls(numbers, cached, theta, exposed_ms, times.compute_ms(len(numbers)), rounds)

    @property
    def budget(self) -> float:
        """Slots of all layers."""
        return sum(self.slots)

    @property
    def tpot_ms(self) -> float:
        """Predicted time of a decoded token."""
        return self.compute_ms + sum(self.exposed_ms)

    def in_blocks(self, blocks: int) -> tuple[LayerBlocks, ...]:
        """The plan for experts of `blocks` equal blocks: what each layer may keep, rounded down, and the tops that as
        many experts as planned have room for, no more than planned and at least a block."""
        found = []
        for slots, cached, theta in zip(self.slots, self.cached, self.theta, strict=True):
            capacity, most = int(slots * blocks + 1e-6), math.ceil(theta * blocks - 1e-6)
            found.append(LayerBlocks(capacity, max(1, min(capacity // cached, most)) if cached else 0))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: object, layers: int, experts: int) -> CachePlan:
        """Reads what `as_json` gave, of a model of these sizes. Raises ValueError, with the end of a sentence."""
        if not isinstance(value, Mapping) or set(value) != set(cls.__slots__):
            raise ValueError("its plan does not say what a plan says")
        most = {"slots": experts, "cached": experts, "theta": 1.0, "exposed_ms": math.inf}
        for name, limit in most.items():
            kind = int if name == "cached" else float
            if not isinstance(value[name], list) or len(value[name]) != layers:
                raise ValueError(f"its plan does not have {name} for each layer")
            if not all(_is_number(one, kind) and one <= limit for one in value[name]):
                raise ValueError(f"its plan has {name} that no layer can have")
        if not _is_number(value["compute_ms"], float) or not _is_number(value["rounds"], int):
            raise ValueError("its plan has a time or a number of rounds that is none")
        rows = {name: tuple(value[name]) for name in most}
        return cls(**rows, compute_ms=value["compute_ms"], rounds=value["rounds"])


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    """Whether a value read from JSON is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    return 0 <= value < math.inf
