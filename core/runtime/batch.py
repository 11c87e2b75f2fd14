"""What one forward pass computes: the next tokens of some sequences, and the logits that follow them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.hf.cached_pass import cached_pass
from core.hf.packed_texts import AnyPacking
from core.memory.to_device import to_device
from core.runtime.sequence_kv import SequenceKV
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
def compute(
    model: Any, device: torch.device, batch: Batch, keep: int = 1, packing: AnyPacking | None = None
) -> torch.Tensor:
    """Run the model over the batch -> logits [keep, V] of the last rows of each share, one share after the other. Their
    KV then holds the tokens. Several shares need `packing`."""
    kvs = [kv for share in batch.shares if (kv := share.kv) is not None]
    assert len(kvs) == len(batch.shares), "there is nothing that the tokens follow"
    for kv in kvs:
        kv.whole = False  # until all layers hold the tokens
    if len(kvs) == 1:
        inputs = to_device([batch.tokens], device)
        logits = cached_pass(model, inputs, kvs[0].cache, logits_to_keep=keep).logits[0]
    else:
        assert packing is not None, "a pass over several sequences needs to know the model's mixers"
        tokens, lengths = [share.tokens for share in batch.shares], [kv.length for kv in kvs]
        for kv in kvs:
            kv.packed = True
        logits = packing.compute(tokens, lengths, [kv.cache for kv in kvs], device, keep)
    for share, kv in zip(batch.shares, kvs, strict=True):
        kv.length, kv.whole = kv.length + len(share.tokens), True
    result: torch.Tensor = logits
    return result
