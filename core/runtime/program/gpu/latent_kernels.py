"""What attention to latents computes before and after attention, on a GPU: launches of the kernels of latent.py and
absorb.py, on the current stream."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from core.memory.codec.kernels.products import Starter
from core.memory.codec.tables import TABLES
from core.runtime.program.absorb import Absorb
from core.runtime.program.gpu.layer import LayerKernels, power_of_2
from core.runtime.program.latent import Latent
from core.runtime.program.rotate import Rotate

TOGETHER = 4  # rows for which weights are unpacked once
LATENTS = 128  # numbers of a latent of a program of queries
VALUES = 16  # numbers of a head of a program of values


class Kept(NamedTuple):
    """Where latents and the part of keys that heads share are in a KV cache: addresses, and bytes from one position to
    the next."""

    latents: int
    keys: int
    latent_row: int
    key_row: int


class LatentKernels:
    """What the layers of a model share. Raises ImportError."""

    def __init__(self, kernels: LayerKernels) -> None:
        from core.memory.codec.fast.gpu import form
        from core.runtime.program.gpu import absorb, latent

        self._numbers, self._form = form.NUMBERS, functools.cache(form.form)
        self._start, self._latent, self._absorb = kernels.start, latent.latent, absorb
        self._tables: dict[tuple[str, torch.device], torch.Tensor] = {}

    def begin(
        self,
        spec: Latent,
        q: torch.Tensor,
        kv: torch.Tensor,
        weight: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        kept: Kept,
        out: torch.Tensor,
    ) -> None:
        """From products q [T, heads * (keys + turned)] and kv [T, latent + turned] to latents and keys in the cache,
        and to the last numbers of out [T, heads, latent + turned], all fp32. `weight` of the latents' norm; `angles`:
        cos and sin of all positions; `positions` [T] int64."""
        constants = {
            "CACHE": self._numbers[spec.cache],
            "S": spec,
            "ROTATE": Rotate(1, 1, spec.turned, spec.turned, spec.cache, interleaved=spec.interleaved),
            "BLOCK": max(8, power_of_2(spec.norm.width)),
            "TURNED": max(8, power_of_2(spec.turned)),
        }
        start = self._start(self._latent, constants, warps=4)
        latents, keys, *rows = kept
        given = q, kv, weight, *angles, positions, latents, keys
        start[1 + spec.heads, len(q)](*given, out, q.stride(0), kv.stride(0), *rows)

    def queries(self, spec: Absorb, slot: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """From x [T, heads * (keys + turned)] to the first numbers of out [T, heads, latent + turned], fp32, by the
        matrix at an address."""
        start, rows = self._by(self._absorb.queries, spec, len(x), LATENTS)
        programs = -(-spec.latent // LATENTS), spec.heads, rows
        start[programs](x, slot, self._table(spec, x.device), out, len(x), x.stride(0))

    def values(self, spec: Absorb, slot: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """From x [T, heads, latent] to out [T, heads * values], fp32, by the matrix at an address."""
        start, rows = self._by(self._absorb.values, spec, len(x), VALUES)
        start[-(-spec.values // VALUES), spec.heads, rows](x, slot, self._table(spec, x.device), out, len(x))

    def _by(self, kernel: object, spec: Absorb, count: int, block: int) -> tuple[Starter, int]:
        together = 1 if count == 1 else TOGETHER
        constants = {"A": spec, "F": self._form(spec.matrix), "TOGETHER": together, "BLOCK": block}
        return self._start(kernel, constants, warps=1), -(-count // together)

    def _table(self, spec: Absorb, device: torch.device) -> torch.Tensor | None:
        """The numbers of codes that are not evenly spaced."""
        name = spec.matrix.table
        if not name:
            return None
        if (name, device) not in self._tables:
            self._tables[name, device] = torch.tensor(TABLES[name], dtype=torch.float32, device=device)
        return self._tables[name, device]
