"""An answer, while budgets and policies change, with all that it gave: for engines that lead tokens differently."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from core.engine import Engine
from core.errors import MoestroError
from core.settings.sampling import Sampling
from core.types import Piece, StepRecord

PROMPT = "hello there, how are you? " * 2
BUDGETS = ("30%", "45%", "70%", "100%")


class Run(NamedTuple):
    """What an answer gave: logits [n, V] and, after each token, its record and which experts have slots."""

    logits: torch.Tensor
    steps: list[StepRecord]
    resident: list[list[bool]]


def greedy(seen: list[torch.Tensor]) -> Callable[[Sequence[int], torch.Tensor], int]:
    """Draws the likeliest token; `seen` gets the logits [V] before each."""

    def draw(_: Sequence[int], logits: torch.Tensor) -> int:
        seen.append(logits[0].clone())
        return int(logits[0].argmax())

    return draw


def answer(engine: Engine, tokens: int, seed: int = 0, said: Sequence[int] = ()) -> Run:
    """An answer while budgets and policies change, the same whenever the seed is: of the likeliest tokens, or `said`
    ones."""
    draw, logits, steps, resident = random.Random(seed), list[torch.Tensor](), list[StepRecord](), list[list[bool]]()

    def drawn(ids: Any, row: torch.Tensor) -> int:
        logits.append(row[0].float().clone())
        return said[len(logits) - 1] if said else int(row.argmax())

    for piece in engine.generate(PROMPT, Sampling(max_new_tokens=tokens), draw=drawn):
        if piece.step is not None:
            steps.append(piece.step)
            resident.append([bool(slots) for slots in engine.expert_cache.core.table])
            engine.expert_cache.check_integrity()
        with suppress(MoestroError):  # some do not go together: then nothing has changed
            if draw.random() < 0.15:
                engine.change({"budget": draw.choice(BUDGETS)})
            if draw.random() < 0.1:
                engine.change({"eviction": draw.choice(("lru", "lfu"))})
    return Run(torch.stack(logits), steps, resident)


def passes_of(pieces: Iterable[Piece]) -> list[StepRecord]:
    """The passes of an answer, each once."""
    return [*{piece.step.index: piece.step for piece in pieces if piece.step is not None}.values()]
