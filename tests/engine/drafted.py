"""Answers with what was drawn, recorded and computed for each of their tokens, and models whose tokens are guessed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from core.engine import Engine
from core.settings.sampling import Sampling
from core.types import AnswerStats, Ids, StepRecord

TOKENS = 40
PROMPT = "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat. The dog"
IDS = Ids([5, 9, 200, 31, 31, 7, 8, 9])
HOW: dict[str, Any] = dict(arithmetic="fast", context=256)


def guessing(engine: Engine, count: int | None, source: str = "lookup") -> None:
    """As many tokens always, or as the gate says, or None: none at all."""
    engine.change({"drafts": "off" if count is None else source})
    drafter, fixed = engine.parts.drafter, count or None
    drafter.gate.fixed = fixed if source == "lookup" else None
    drafter.head_gate.fixed = drafter.model_gate.fixed = fixed


def first_tokens(pieces: Iterator[Any], most: int, then: Callable[[], object]) -> list[int]:
    """The tokens of an answer; after so many, `then` is called."""
    found = list[int]()
    for piece in pieces:
        if piece.token is not None:
            found.append(piece.token)
            if len(found) == most:
                then()
    return found


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
