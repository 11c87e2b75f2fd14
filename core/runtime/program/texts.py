"""The texts of a pass: what the KV cache holds of each sequence, and the rows that follow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from core.hf.reserved_layers import Part
from core.runtime.batch import Batch
from core.runtime.program.bind import Form
from core.runtime.program.mixer import Text


@contextmanager
def texts_of(
    form: Form, parts: Sequence[Sequence[Part]], batch: Batch, keep: int, device: torch.device
) -> Iterator[tuple[list[int], list[Text]]]:
    """The positions of all rows, and the texts with memory on a device; of each the last `keep` rows have logits. The
    KV holds the rows after a pass that raised nothing. Raises IndexError where the tables of embeddings or angles have
    no such row."""
    positions = [share.kv.length + i for share in batch.shares if share.kv for i in range(len(share.tokens))]
    _check(form, batch.tokens, positions)
    texts = list[Text]()
    for share in batch.shares:
        kv, rows = share.kv, len(share.tokens)
        assert kv is not None, "there is nothing that the tokens follow"
        kv.whole = False
        texts.append(Text(kv, kv.memory.allocated(kv, parts, rows, device), rows, min(keep, rows)))
    yield positions, texts
    for kv, _, count, _ in texts:
        kv.memory.grow(kv, count)
        kv.whole = True


def _check(form: Form, tokens: Sequence[int], positions: Sequence[int]) -> None:
    embeddings = form.embedding.weight
    assert isinstance(embeddings, torch.Tensor)
    for what, found, end in (("token", tokens, len(embeddings)), ("position", positions, form.context)):
        if not 0 <= min(found) <= max(found) < end:
            raise IndexError(f"{what} {min(found)} or {max(found)} is outside of the model's {end}")
