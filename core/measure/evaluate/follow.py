"""Teacher forcing: a model reads a given text one token at a time, as if it were generating it."""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from core.engine import Engine
from core.memory.store import Cancelled
from core.settings.sampling import Sampling
from core.types import Ids, StepRecord


def follow(
    engine: Engine, ids: Sequence[int], start: int, cancel: threading.Event, heard: Callable[[StepRecord], None]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields, for every position from `start` (at least 1) on, the position and the logits [V] from which its token
    would have been drawn. ids[:start] is read as a prompt, the rest token by token, with all settings in force.

    `heard` is called with every forward pass. At most `engine.context` ids. Raises ContextError, BusyError, Cancelled.
    """
    drawn: list[tuple[int, torch.Tensor]] = []

    def draw(so_far: Sequence[int], logits: torch.Tensor) -> int:
        drawn.append((len(so_far), logits[0]))
        return int(ids[len(so_far)])

    while start < len(ids):  # repeated only when a token of the text ends an answer
        pieces = engine.generate(Ids(ids[:start]), Sampling(max_new_tokens=len(ids) - start), cancel, draw)
        for piece in pieces:
            if piece.step is not None:
                heard(piece.step)
            for at, logits in drawn:
                yield at, logits
                start = at + 1
            drawn.clear()
        if cancel.is_set():
            raise Cancelled
