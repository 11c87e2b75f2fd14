"""The kernels' results in numpy: one operation at a time, in the order that core.runtime.program states."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
LN2 = np.float32(math.log(2))
SHIFT = np.float32(1.5 * 2**23)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """a * b + c rounded once to fp32. The product is exact in fp64; the sum is rounded to odd there, after which
    rounding it to fp32 is as if it had been exact."""
    x, y, z = (np.asarray(value, np.float32).astype(np.float64) for value in (a, b, c))
    with np.errstate(all="ignore"):
        product = x * y
        found = np.asarray(product + z)
        back = found - product
        error = (product - (found - back)) + (z - back)  # two-sum: found + error is exact
        even = (found.view(np.int64) & 1) == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        odd = np.isfinite(found) & (error != 0) & even
        return np.where(odd, np.nextafter(found, towards), found).astype(np.float32)


def total(lanes: Floats) -> Floats:
    """The sum of eight lanes (the last axis)."""
    with np.errstate(all="ignore"):
        p = lanes[..., :4] + lanes[..., 4:]
        return (p[..., 0] + p[..., 2]) + (p[..., 1] + p[..., 3])


def eights(values: npt.ArrayLike) -> Floats:
    """[..., n] -> [..., ceil(n / 8), 8], filled up with 0."""
    found = np.asarray(values, np.float32)
    missing = -found.shape[-1] % 8
    found = np.concatenate([found, np.zeros((*found.shape[:-1], missing), np.float32)], -1)
    return found.reshape(*found.shape[:-1], -1, 8)


def dot(a: npt.ArrayLike, b: npt.ArrayLike) -> Floats:
    """The sum of products over the last axis."""
    x, y = eights(a), eights(b)
    lanes = np.zeros((*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), 8), np.float32)
    for i in range(x.shape[-2]):
        lanes = fma(x[..., i, :], y[..., i, :], lanes)
    return total(lanes)


def exp(x: npt.ArrayLike) -> Floats:
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float32)
        x = np.where(x < -104, np.float32(-104), np.where(x > 89, np.float32(89), x))
        n = fma(x, np.float32(1 / math.log(2)), SHIFT) - SHIFT
        r = fma(n, np.float32(-(math.log(2) - float(LN2))), fma(n, -LN2, x))
        value = np.full_like(x, np.float32(1 / math.factorial(7)))
        for power in range(6, -1, -1):
            value = fma(value, r, np.float32(1 / math.factorial(power)))
        whole = np.where(np.isnan(n), 0, n).astype(np.int32)
        half = whole >> 1
        return np.ldexp(np.ldexp(value, half), whole - half).astype(np.float32)


def sigmoid(x: npt.ArrayLike) -> Floats:
    with np.errstate(all="ignore"):
        return np.float32(1) / (np.float32(1) + exp(-np.asarray(x, np.float32)))


def tanh(x: npt.ArrayLike) -> Floats:
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        return np.float32(1) - np.float32(2) / (np.float32(1) + exp(x + x))


def rounded(values: npt.ArrayLike, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(values, np.float32))).to(dtype)


def rms(x: Floats, weight: Floats | None, eps: float, offset: bool) -> Floats:
    """x [..., width] -> the same in fp32."""
    with np.errstate(all="ignore"):
        mean = dot(x, x) / np.float32(x.shape[-1])
        found = x * (np.float32(1) / np.sqrt(mean + np.float32(eps)))[..., None]
        if weight is None:
            return found
        return found * (np.float32(1) + weight if offset else weight)


def turned(x: Floats, cos: Floats, sin: Floats, interleaved: bool) -> Floats:
    """x [rows, heads, width]; cos and sin [rows, rotated / 2]."""
    half = cos.shape[-1]
    a, b = [(slice(0, half), slice(half, 2 * half)), (slice(0, 2 * half, 2), slice(1, 2 * half, 2))][interleaved]
    c, s, found = cos[:, None], sin[:, None], x.copy()
    with np.errstate(all="ignore"):
        found[..., a] = fma(x[..., a], c, -(x[..., b] * s))
        found[..., b] = fma(x[..., b], c, x[..., a] * s)
    return found


def attend(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: npt.NDArray[np.int64],
    *,
    scale: float,
    window: int = 1 << 62,
    softcap: float = 0.0,
    sinks: Floats | None = None,
) -> Floats:
    """q [rows, query heads, width], k and v [heads, positions, width] -> [rows, query heads, width of v]."""
    rows, query_heads, _ = q.shape
    out = np.zeros((rows, query_heads, v.shape[-1]), np.float32)
    of = np.arange(query_heads) * len(k) // query_heads
    sinks = np.full(query_heads, -np.inf, np.float32) if sinks is None else sinks
    for row in range(rows):
        end = int(positions[row]) + 1
        out[row] = _attended(q[row], k[of], v[of], (max(0, end - window), end), scale, softcap, sinks)
    return out


def _attended(
    q: Floats, k: Floats, v: Floats, reach: tuple[int, int], scale: float, softcap: float, most: Floats
) -> Floats:
    """q [query heads, width], k and v [query heads, positions, width], most [query heads] -> [query heads, width of v]:
    each head's numbers are in no other's."""
    weights, out = np.zeros((len(q), 8), np.float32), np.zeros((len(q), v.shape[-1]), np.float32)
    weights[:, 0], (begin, end) = most != -np.inf, reach
    with np.errstate(all="ignore"):
        for block in range(begin // 64 * 64, end, 64):
            keys = range(max(begin, block), min(end, block + 64))
            scores = dot(q[:, None], k[:, keys.start : keys.stop]) * np.float32(scale)
            if softcap:
                scores = tanh(scores / np.float32(softcap)) * np.float32(softcap)
            before = most
            for score in scores.T:
                most = np.where(score > most, score, most)
            subtracted = np.where(most == -np.inf, np.float32(0), most)
            factor, found = exp(before - subtracted)[:, None], exp(scores - subtracted[:, None])
            weights, out = weights * factor, out * factor
            for key, weight in zip(keys, found.T, strict=True):
                weights[:, key % 8] += weight
                out = fma(weight[:, None], v[:, key], out)
        return np.asarray(out / total(weights)[:, None], np.float32)


def lane_sum(values: Floats) -> Floats:
    """The sum over the last axis, number i in lane i mod 8."""
    rows, lanes = eights(values), np.zeros((*values.shape[:-1], 8), np.float32)
    with np.errstate(all="ignore"):
        for i in range(rows.shape[-2]):
            lanes = lanes + rows[..., i, :]
    return total(lanes)


def descending(values: Floats) -> npt.NDArray[np.int64]:
    """The places along the last axis, greatest first, NaN before all others; of equals the lower place first."""
    return np.lexsort([np.where(np.isnan(values), 0, -values), ~np.isnan(values)], axis=-1)


def route(
    logits: Floats,
    bias: Floats | None,
    chosen: int,
    *,
    score: str,
    renormalised: bool,
    epsilon: float,
    scale: float,
    scales: Floats | None = None,
    groups: tuple[int, int, int] = (1, 1, 1),
) -> tuple[npt.NDArray[np.int64], Floats]:
    """logits [tokens, experts] -> ids and weights [tokens, chosen]. `groups`: how many, how many of them are kept,
    and how many of their greatest numbers decide."""

    def softmax(x: Floats) -> Floats:
        greatest = np.where(np.isnan(x), np.float32(-np.inf), x).max(-1, keepdims=True)
        found = exp(x - greatest)
        return np.asarray(found / lane_sum(found)[:, None])

    with np.errstate(all="ignore"):
        scores = {"softmax": softmax, "sigmoid": sigmoid, "softmax_chosen": lambda x: x}[score](logits)
        order = np.array(logits if bias is None else scores + bias)
        count, kept, best = groups
        grouped = order.reshape(len(logits), count, -1)
        sums = np.take_along_axis(grouped, descending(grouped)[..., :best], -1)
        keep = descending(sums[..., 0] + sums[..., 1] if best == 2 else sums[..., 0])[:, :kept]
        for token in range(len(logits) * (kept < count)):
            others = np.setdiff1d(np.arange(count), keep[token])
            grouped[token, others] = -np.inf  # a view of order
        ids = descending(order)[:, :chosen]
        weights = np.take_along_axis(scores, ids, -1)
        if score == "softmax_chosen":
            weights = softmax(weights)
        if renormalised:
            weights = weights / (lane_sum(weights) + np.float32(epsilon))[:, None]
        weights = weights * np.float32(scale)
        return ids, weights if scales is None else weights * scales[ids]


def gate(
    x: Floats,
    *,
    activation: str,
    interleaved: bool = False,
    slope: float = 1.0,
    limit: float = 0.0,
    shift: float = 0.0,
    ups: bool = True,
    of_factors: bool = False,
) -> Floats:
    """x [rows, width], or with ups [rows, 2 * width] -> [rows, width]."""
    half = x.shape[-1] // 2
    g, u = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:]) if ups else (x, x)
    with np.errstate(all="ignore"):
        if limit:
            g = g if of_factors else np.where(g > limit, np.float32(limit), g)
            u = np.where(u > limit, np.float32(limit), np.where(u < -limit, np.float32(-limit), u))
        if activation in ("relu", "relu2"):
            value = np.where(g < 0, np.float32(0), g)
            value = value * value if activation == "relu2" else value
        elif activation == "silu":
            value = g / (np.float32(1) + exp(g * np.float32(-slope)))
        else:
            c = -2 * math.sqrt(2 / math.pi)
            value = g / (np.float32(1) + exp(g * fma(g * g, np.float32(c * 0.044715), np.float32(c))))
        if of_factors:
            value = np.where(value > limit, np.float32(limit), value)
        return np.asarray(value * (u + np.float32(shift) if shift else u) if ups else value)


def combine(
    experts: Floats, pairs: npt.NDArray[np.int64], weights: Floats, shared: Floats | None, shared_gate: Floats | None
) -> Floats:
    """experts [n, width], pairs and weights [tokens, chosen], shared [tokens, width], shared_gate [tokens]."""
    out = np.zeros((len(pairs), experts.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        for token, chosen in enumerate(pairs):
            for j, row in enumerate(chosen):
                if row >= 0:
                    out[token] = fma(weights[token, j], experts[row], out[token])
        if shared is not None and shared_gate is not None:
            return fma(sigmoid(shared_gate)[:, None], shared, out)
        return out if shared is None else out + shared
