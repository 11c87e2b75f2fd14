"""What the passes of a batch did, over the whole run: for the live view."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.engine.batch_request import Regrouped
from core.types import ModelShape, Outcome, StepRecord

MISSES = (Outcome.MISS, Outcome.MISS_DISK)
SHOWN = 400  # passes in the figure


@dataclass(slots=True)
class BatchFigures:
    """Sums over the passes of one run, and the unions of its last ones."""

    shape: ModelShape
    requests: int = 0  # distinct experts that passes requested, layer by layer
    hits: int = 0
    copied: int = 0  # experts
    bytes: int = 0
    pairs: int = 0  # (token, expert) in all layers
    decode_union: float = 0.0  # experts a layer, summed over decode passes
    decodes: int = 0
    unions: deque[float] = field(default_factory=lambda: deque(maxlen=SHOWN))  # of the last decode passes
    regrouped: Sequence[Regrouped] = ()  # what the scheduler did, the last times

    def add(self, step: StepRecord) -> None:
        """Count one pass."""
        requested, layers = step.requests, len(set(step.layer.tolist()))
        self.requests += requested
        self.hits += step.hits
        self.copied += int(np.isin(step.outcome, MISSES).sum()) + step.prefetch_issued
        self.bytes += step.demand_bytes + step.prefetch_bytes
        self.pairs += step.tokens * self.shape.top_k * layers
        if step.phase == "decode" and layers:
            self.decodes += 1
            self.decode_union += requested / layers
            self.unions.append(requested / layers)

    @property
    def scheduled(self) -> Regrouped | None:
        """The means of what the scheduler did."""
        known = list(self.regrouped)
        return Regrouped(*(sum(each) / len(known) for each in zip(*known, strict=True))) if known else None

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.requests if self.requests else None

    @property
    def union(self) -> float | None:
        """Distinct experts a layer in a pass that decodes, mean."""
        return self.decode_union / self.decodes if self.decodes else None

    @property
    def uses_per_expert(self) -> float | None:
        """Tokens that an expert computes when a pass asks for it, mean: prompts count."""
        return self.pairs / self.requests if self.requests else None

    @property
    def uses_per_copy(self) -> float | None:
        """(token, expert) pairs for each expert that was copied; None when nothing was."""
        return self.pairs / self.copied if self.copied else None
