"""A pass of a layer's attention over random states: what the program's own is compared with."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from core.errors import ModelError
from core.runtime.program.weights import TRIED, drawn, forward


class Angles(NamedTuple):
    """What gives a layer's modules the angles of positions [1, T] and their type, and the cos and sin of every
    position, [context, rotated / 2] fp32."""

    of: Callable[[torch.Tensor, torch.Tensor], Any]
    cos: torch.Tensor
    sin: torch.Tensor


class Trial(NamedTuple):
    """A module's own results for some random rows."""

    x: torch.Tensor  # [T, H]
    keys: torch.Tensor  # as it appends them to a KV cache, without a batch: [heads, T, width]
    values: torch.Tensor
    output: torch.Tensor  # [T, H]
    positions: torch.Tensor  # [T], int64
    cos: torch.Tensor  # [T, rotated / 2]
    sin: torch.Tensor


class _Seen:
    """In place of a KV cache: what a module appends."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys, self.values = keys, values
        return keys, values


@torch.inference_mode()
def trial(module: Any, angles: Angles, dtype: torch.dtype, hidden: int, window: int = 0) -> Trial:
    """A pass of a layer's attention over states [T, hidden]; `window`: of the last tokens, 0 = all."""
    rotary, *tables = angles
    rows = min(TRIED, len(angles.cos))
    x, seen, positions = drawn(dtype, 1, TRIED, hidden)[:, :rows], _Seen(), torch.arange(rows)
    mask = torch.full((rows, rows), float("-inf"), dtype=dtype)
    mask = (mask.triu(1) + mask.tril(-window) if window else mask.triu(1))[None, None]
    names = inspect.signature(type(module).forward).parameters
    cache = "cache" if "cache" in names else "past_key_values"
    turned = rotary(x, positions[None])
    given = {"position_embeddings": turned, "attention_mask": mask, cache: seen}
    given |= {"shared_kv_states": {}} if "shared_kv_states" in names else {}
    last = positions + len(angles.cos) - rows
    output, *other = (
        forward(module, x, **given, **more)[0]
        for more in ([{"position_ids": one[None]} for one in (positions, last)] if "position_ids" in names else [{}])
    )
    if other and not torch.equal(output, other[0]):
        raise ModelError("attention in which more than angles depends on positions is not known")
    cos, sin = (table[:rows].contiguous() for table in tables)
    return Trial(x[0], seen.keys[0], seen.values[0], output[0], positions, cos, sin)
