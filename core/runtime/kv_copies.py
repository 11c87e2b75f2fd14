"""Copies of the KV cache in host memory."""

from dataclasses import dataclass
from typing import Any

import torch

from core.hf.reserved_layers import Copied


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """Copies in host memory of what cannot be cut, when the KV held `length` tokens: states of linear attention, and
    windows."""

    length: int
    layers: tuple[Copied, ...]

    @property
    def bytes(self) -> int:
        """Host bytes."""
        return _bytes(self.layers)


@dataclass(frozen=True, slots=True)
class Stash:
    """A KV copied to host memory: its first `length` tokens. Without a checkpoint (a pass was aborted, and what cannot
    be cut is lost) it can be put back only together with another checkpoint."""

    length: int
    layers: tuple[Copied, ...]
    checkpoint: StateCheckpoint | None
    cuttable: bool  # it can be put back to any number of tokens
    lossy_from: int | None
    lossy_keys: tuple[str, ...]
    packed: bool = False

    @property
    def bytes(self) -> int:
        """Host bytes."""
        return _bytes(self.layers) + (self.checkpoint.bytes if self.checkpoint is not None else 0)


def _bytes(copied: Any) -> int:
    """Bytes of all tensors in nested sequences."""
    if isinstance(copied, torch.Tensor):
        return copied.nbytes
    return sum([_bytes(one) for one in copied]) if isinstance(copied, (list, tuple)) else 0
