"""MoEpic's latency model (section 3.4.1, equations 5 to 7) and its sub-problem (equations 9 to 11): how many experts a
layer's share of the budget should hold, and so which part of each, and what then remains to be waited for.

Slots are counted in whole experts, and may be fractions of them. C cached experts in V slots each have their top V / C
resident, all of it at most. Alternatives are computed side by side: N of them, along the first axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.policy.allocation.curves import Curves, Floats

Ints = npt.NDArray[np.int64]
Parts = float | Sequence[float]  # one part of an expert, or those that are possible
ROUNDING = 1e-9  # of slots over theta, so that 1.2 / 0.4 holds three tops


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Milliseconds measured on one machine, as core.measure.calibrate.times takes them: attention and experts of one
    layer with all experts resident, everything outside the layers, and the copy of one whole expert."""

    att_ms: float
    moe_ms: float
    head_ms: float
    load_ms: float

    @classmethod
    def of(cls, times: Mapping[str, float]) -> LayerTimes:
        """The part "times" of a profile."""
        return cls(times["att"], times["moe"], times["head"], times["load"])

    def compute_ms(self, layers: int) -> float:
        """A token with every expert resident."""
        return self.head_ms + layers * (self.att_ms + self.moe_ms)


class LayerSplit(NamedTuple):
    """One layer's solutions, [N] each."""

    cached: Ints  # C, experts that have their tops resident
    theta: Floats  # their part that is resident, 0 to 1
    ready: Floats  # m, expected activated experts that are there when the routing is known, 0 to k


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """All layers' solutions, [N, L] each. `window_ms`: for prefetching the layer, before its routing is known.
    `exposed_ms`: waiting that no computation hides."""

    cached: Ints
    theta: Floats
    ready: Floats
    window_ms: Floats
    exposed_ms: Floats


def split_layer(
    curves: Curves, layer: int, slots: Floats, window_ms: Floats, load_ms: float, theta: Parts | None = None
) -> LayerSplit:
    """The C in [1, E] with the most experts `ready`, the smallest of those, for `slots` [N] and prefetch windows [N].

    A given `theta` is kept instead of searched for: then C is what its tops leave room for; 0 caches nothing. Of
    several, the one with the most experts ready, the first of those. Memory: 8 N E Y bytes a few times."""
    k, experts = curves.top_k, curves.experts
    if theta is None:
        sizes: Ints = np.broadcast_to(np.arange(1, experts + 1), (len(slots), experts))
        share = np.minimum(1.0, slots[:, None] / sizes)  # [N, c]
        hit, cached = curves.hit[layer, 1:], curves.cached[layer, 1:]  # [c], [c, Y]
    else:
        parts = np.atleast_1d(np.asarray(theta, np.float64))  # [c]
        most = np.divide(slots[:, None], parts, out=np.zeros((len(slots), len(parts))), where=parts > 0)
        sizes = np.minimum(np.floor(most + ROUNDING), experts).astype(np.int64)
        share = np.broadcast_to(parts, sizes.shape)
        hit, cached = curves.hit[layer, sizes], curves.cached[layer, sizes]
    fetched = 1.0 - cached * share[..., None]  # [N, c, Y] experts that prefetching the y-th copies
    in_time = np.cumsum(fetched, -1) * load_ms <= window_ms[:, None, None]
    ready = k * hit * share + (fetched * curves.chosen[layer] * in_time).sum(-1)
    ready = np.clip(ready, 0.0, k)
    best = ready.argmax(1)[:, None]
    return LayerSplit(*(np.take_along_axis(one, best, 1)[:, 0] for one in (sizes, share, ready)))


def split_experts(
    curves: Curves, times: LayerTimes, slots: Floats, theta: float | Sequence[Parts] | None = None
) -> Split:
    """Algorithm 1's ExpertSplit, for slots [N, L] of the layers. A layer's window is what the layer before leaves.
    `theta`: one for all layers, or what each may have; None = each its best."""
    k, shape = curves.top_k, slots.shape
    part: list[Parts | None] = list(theta) if isinstance(theta, Sequence) else [theta] * curves.layers
    split = Split(np.zeros(shape, np.int64), *(np.zeros(shape) for _ in range(4)))
    window_ms = np.full(len(slots), times.head_ms + times.att_ms)
    for layer in range(curves.layers):
        found = split_layer(curves, layer, slots[:, layer], window_ms, times.load_ms, part[layer])
        hide_ms, miss_ms = found.ready * times.moe_ms / k, (k - found.ready) * times.load_ms
        split.cached[:, layer], split.theta[:, layer], split.ready[:, layer] = found
        split.window_ms[:, layer] = window_ms
        split.exposed_ms[:, layer] = np.maximum(0.0, miss_ms - hide_ms)
        window_ms = times.moe_ms - np.minimum(hide_ms, miss_ms) + times.att_ms
    return split
