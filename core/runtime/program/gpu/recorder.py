"""A launcher that launches nothing: for kernels that are compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from core.memory.codec.kernels.build import Kinds, kinds_of

META = torch.device("meta")


class Recorder:
    """A launcher that keeps what would be launched: (kernel, constants, kinds of its arguments)."""

    def __init__(self) -> None:
        self.launched = list[tuple[Any, Mapping[str, Any], Kinds]]()

    def __call__(self, kernel: Any, constants: Mapping[str, Any]) -> _Recording:
        return _Recording(lambda *given: self.launched.append((kernel, constants, kinds_of(given))))


class _Recording:
    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        return self._call


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor that has no numbers."""
    return torch.empty(shape, dtype=dtype, device=META)
