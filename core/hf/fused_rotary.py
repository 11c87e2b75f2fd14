"""Rotary embeddings of queries and keys on a GPU in one launch, where a model's own code takes some ten."""

import functools
from typing import Any

import torch

from core.hf.rotary_form import Form, Pair, Rotate, Strides
from core.memory.codec import kernels

NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""Of the compiler. A sum contracted with a product would be rounded once, where torch rounds twice."""


def available(device: torch.device) -> bool:
    """Whether the kernel can be tried on a device."""
    return kernels.available(device)


def takes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether a call can be computed here."""
    return available(q.device) and q.dtype in NUMBERS and cos.dtype in NUMBERS


class FusedRotation:
    """Rotates queries and keys [1, heads, T, head] of the shapes and strides of those it is made with."""

    def __init__(self, form: Form, states: Pair, tables: Pair, results: Pair) -> None:
        """`results`: tensors of the shapes and strides that its own should have."""
        self.form = form
        q, k = results
        self._like = q.dtype, q.device
        self._q, self._k = (q.shape, q.stride()), (k.shape, k.stride())
        self._grid = q.shape[1] + k.shape[1], q.shape[2]
        strides = [Strides.of(one) for x, out in zip(states, results, strict=True) for one in (x, out)]
        self._layout = (q.shape[1], *(table.stride(1) for table in tables), *(n for one in strides for n in one))
        self._chosen = chosen(form, q.shape[-1], k.shape[-1])

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        dtype, device = self._like
        one = torch.empty_strided(*self._q, dtype=dtype, device=device)
        other = torch.empty_strided(*self._k, dtype=dtype, device=device)
        launch(self._grid, (q, k, cos, sin, one, other, *self._layout), self._chosen)
        return one, other


def made(form: Form, states: Pair, tables: Pair, results: Pair) -> Rotate:
    """What computes a form for arguments such as these."""
    return FusedRotation(form, states, tables, results)


def chosen(form: Form, queries: int, keys: int) -> dict[str, object]:
    """Compile-time parameters of the kernel for heads of these widths."""
    return {
        "Q_NUMBERS": queries,
        "K_NUMBERS": keys,
        "WIDTH": form.width,
        "GIVEN": form.given,
        "PUT": form.put,
        "TABLE": form.table,
        "ROUNDS": form.rounds,
        "COUPLES": covering(form.couples),
        "REST": covering(max(queries, keys) - form.width),
    }


def covering(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def launch(grid: tuple[int, int], given: tuple[Any, ...], parameters: dict[str, object]) -> None:
    """Start the kernel; waits for nothing. Raises DriverError, and what Triton raises."""
    _starter(given[0].device, tuple(parameters.items()))[grid](*given)


@functools.cache
def _starter(device: torch.device, parameters: tuple[tuple[str, object], ...]) -> Any:
    from core.hf.rotary_kernel import rotate

    return kernels.launcher_of(device)(rotate, dict(parameters) | OPTIONS)
