"""What one forward pass computes: the next tokens of some sequences, and the logits that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.runtime.kv_cache import SequenceKV
from core.types import Phase


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a pass that belong to one sequence: its next tokens [t], which follow what `kv` holds. `kv` is None
    where layers are computed without the model around them. `request` = the answer they are computed for; 0 = none."""

    tokens: Sequence[int]
    kv: SequenceKV | None = None
    request: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The shares of one pass. Its rows [T] are those of the first share, then those of the next."""

    phase: Phase
    shares: tuple[Share, ...]

    @property
    def tokens(self) -> list[int]:
        """[T] token ids."""
        return [token for share in self.shares for token in share.tokens]

    @property
    def size(self) -> int:
        """T."""
        return sum([len(share.tokens) for share in self.shares])

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Whose the rows are, in order: the request of each share, and how many are its."""
        return tuple([(share.request, len(share.tokens)) for share in self.shares])


@torch.inference_mode()
def compute(model: Any, device: torch.device, batch: Batch, keep: int = 1) -> torch.Tensor:
    """Run the model over the batch -> logits [keep, V] of the last rows of each share, one share after the other. Their
    KV then holds the tokens. The model is given one sequence: a pass has one share."""
    (share,) = batch.shares
    assert share.kv is not None, "there is nothing that the tokens follow"
    inputs = torch.tensor([list(share.tokens)], device=device)
    share.kv.whole = False  # until all layers hold the tokens
    output = model(input_ids=inputs, past_key_values=share.kv.cache, use_cache=True, logits_to_keep=keep)
    share.kv.length, share.kv.whole = share.kv.length + len(share.tokens), True
    logits: torch.Tensor = output.logits[0]
    return logits
