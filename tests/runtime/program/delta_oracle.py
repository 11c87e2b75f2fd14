"""As `oracle`: the kernels of gated delta nets."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from tests.runtime.program.oracle import Floats, dot, exp, fma, rms, sigmoid

Columns = npt.NDArray[np.int64]


def softplus(x: npt.ArrayLike) -> Floats:
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float32)
        t = exp(-np.abs(x))
        s = t / (t + np.float32(2))
        value = np.full_like(x, np.float32(1 / 17))
        for power in range(7, -1, -1):
            value = fma(value, s * s, np.float32(1 / (2 * power + 1)))
        return fma(s + s, value, np.where(x > 0, x, np.float32(0)))


def silu(x: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.asarray(x / (np.float32(1) + exp(-x)))


def convolve(x: Floats, state: torch.Tensor, weight: Floats, bias: Floats | None) -> tuple[Floats, torch.Tensor]:
    """x [rows, channels], state [channels, size], weight [size, channels], bias [channels] -> output [rows, channels],
    and the state after it."""
    size = state.shape[1]
    inputs = torch.cat([state.T, torch.from_numpy(x).to(state.dtype)])
    out = np.zeros_like(x)
    for row in range(len(x)):
        for j in range(size):
            out[row] = fma(weight[j], inputs[row + 1 + j].float().numpy(), out[row])
    with np.errstate(all="ignore"):
        return silu(out if bias is None else out + bias), inputs[len(x) :].T.contiguous()


def delta_inputs(
    q: Floats, k: Floats, a: Floats, b: Floats, a_log: Floats, dt_bias: Floats, eps: float
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """q and k [rows, key heads, width], a and b [rows, value heads], a_log and dt_bias [value heads] -> normed queries
    and keys, their products [rows, key heads], decays and rates [rows, value heads]."""
    with np.errstate(all="ignore"):
        one, other = (x * (np.float32(1) / np.sqrt(dot(x, x) + np.float32(eps)))[..., None] for x in (q, k))
        one = one * np.float32(1 / math.sqrt(q.shape[-1]))
        return one, other, dot(one, other), exp(-(exp(a_log) * softplus(a + dt_bias))), sigmoid(b)


def delta_rule(
    q: Floats, k: Floats, v: Floats, products: Floats, decays: Floats, rates: Floats, state: Floats
) -> Floats:
    """q and k [rows, key heads, key width], v [rows, value heads, value width], state [value heads, key width, value
    width], which is brought up to date -> [rows, value heads, value width]."""
    out = np.zeros_like(v)
    with np.errstate(all="ignore"):
        for row in range(len(v)):
            for head in range(len(state)):
                of, s = head * q.shape[1] // len(state), state[head]
                a, b = np.zeros(v.shape[-1], np.float32), np.zeros(v.shape[-1], np.float32)
                for i in range(q.shape[-1]):
                    a, b = fma(k[row, of, i], s[i], a), fma(q[row, of, i], s[i], b)
                decay = decays[row, head]
                d = fma(-decay, a, v[row, head]) * rates[row, head]
                out[row, head] = fma(d, products[row, of], decay * b)
                for i in range(q.shape[-1]):
                    s[i] = fma(k[row, of, i], d, decay * s[i])
    return out


def gated_heads(x: Floats, gates: Floats, activation: str, weight: Floats | None, eps: float) -> Floats:
    """x [rows, heads, width], gates as many or [rows, heads, 1]; a norm where there are weights [width]."""
    with np.errstate(all="ignore"):
        normed = x if weight is None else rms(x, weight, eps, False)
        return np.asarray(normed * {"silu": silu, "sigmoid": sigmoid, "softplus": softplus}[activation](gates))
