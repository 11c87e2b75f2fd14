"""Before attention to latents: a row's latent, normed, and the part of keys that all heads share, rotated, go into the
cache, each rounded once; the last numbers of each query are rotated and follow the place of its latent.

The norm is that of `rms`, a pair is turned as by `rotate`.
"""

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.rms import Norm, scale_of, scaled
from core.runtime.program.rotate import turn
from core.runtime.program.vectors import Kernel

FIELDS = (
    "kv",
    "q",
    "weight",
    "cos",
    "sin",
    "positions",
    "latents",
    "keys",
    "out",
    "latent_stride",
    "key_stride",
)


@dataclass(frozen=True)
class Latent:
    """Queries of `heads` with `keys` numbers that are not turned and `turned` that are: number i with i + turned / 2,
    or, where `interleaved`, 2i with 2i + 1. `norm` is of a latent."""

    heads: int
    keys: int
    turned: int
    norm: Norm
    cache: torch.dtype
    interleaved: bool = False

    def __post_init__(self) -> None:
        assert self.turned % 2 == 0


@functools.cache
def kernel(spec: Latent) -> int:
    """The address of the kernel. A unit is a row: kv [rows, latent + turned]; q [rows, heads, keys + turned]; cos and
    sin [rows, turned / 2]; out [rows, heads, latent + turned], of which latents are left alone: all fp32. What a row
    leaves in the cache lies at latents + p * latent_stride and keys + p * key_stride bytes, where p = positions[row],
    i64."""
    code, wide = Kernel("latent"), spec.norm.width + spec.turned
    at = code.fields(FIELDS, ("latent_stride", "key_stride"))
    with code.loop("%from", "%to") as row:
        kv = code.at(at["kv"], row.index, wide * 4)
        cos, sin = (code.at(at[name], row.index, spec.turned * 2) for name in ("cos", "sin"))
        position = code.integer(at["positions"], row.index)
        latent, key = (
            code.at(at[name], code.times(position, at[stride]))
            for name, stride in (("latents", "latent_stride"), ("keys", "key_stride"))
        )
        _norm(code, spec, kv, at["weight"], latent)
        _turn(code, spec, code.at(kv, spec.norm.width, 4), cos, sin, key, spec.cache)
        first = code.times(row.index, spec.heads)
        with code.loop(first, code.add(first, spec.heads)) as head:
            x = code.at(code.at(at["q"], head.index, (spec.keys + spec.turned) * 4), spec.keys, 4)
            out = code.at(code.at(at["out"], head.index, wide * 4), spec.norm.width, 4)
            _turn(code, spec, x, cos, sin, out, torch.float32)
    return code.address()


def _norm(code: Kernel, spec: Latent, x: str, weight: str, out: str) -> None:
    """The norm of a latent into the cache."""
    factor = scale_of(code, spec.norm, x)
    for some in code.over(spec.norm.width):
        value = code.read(x, *some.span, torch.float32)
        value = scaled(code, spec.norm, value, factor, weight, *some.span)
        code.write(value, out, *some.span, spec.cache)


def _turn(code: Kernel, spec: Latent, x: str, cos: str, sin: str, out: str, dtype: torch.dtype) -> None:
    numbers = functools.partial(code.read, x, dtype=torch.float32)
    turn(code, spec.turned, spec.interleaved, numbers, cos, sin, out, dtype)
