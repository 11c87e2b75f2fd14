"""Answers with what was drawn, recorded and computed for each of their tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from core.engine import Engine
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids, StepRecord

TOKENS = 40
PROMPT = "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat. The dog"


class Answer:
    """An answer with the logits that each of its tokens was drawn from."""

    def __init__(self, engine: Engine, sampling: Sampling, prompt: str | Ids = PROMPT, **how: Any) -> None:
        self.tokens, self.steps, self.text, self.logprobs = list[int](), list[StepRecord](), "", list[object]()
        for piece in engine.generate(prompt, sampling, **how):
            if piece.token is not None:
                self.tokens.append(piece.token)
                self.logprobs.append(piece.logprob)
            if piece.step is not None:
                self.steps.append(piece.step)
            self.text += piece.text
            if piece.stats is not None:
                self.stats: AnswerStats = piece.stats
        self.decode = [step for step in self.steps if step.phase == "decode"]


def bits(engine: Engine, prompt: str | Ids = PROMPT) -> tuple[list[int], torch.Tensor]:
    """A greedy answer, and the logits of each of its tokens."""
    seen = list[torch.Tensor]()

    def draw(ids: Sequence[int], given: torch.Tensor) -> int:
        seen.append(given[0].clone())
        return int(given[0].argmax())

    return Answer(engine, Sampling(max_new_tokens=TOKENS), prompt, draw=draw).tokens, torch.stack(seen)
