"""Keeps an answer to a JSON schema or a grammar: no token is drawn with which it could no longer become one of that."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from core.engine.grammar import library, refused, require
from core.engine.prompt import Prompt
from core.errors import PromptError
from core.memory.to_device import to_device
from core.settings.sampling import Sampling

THOUGHT = "</think>"
TAIL = 16  # tokens that are looked at for the end of the reasoning
NO_END = "Answers of this model cannot keep to a JSON schema: its tokenizer has no end token, or is of another kind."


class Constraint:
    """A rule for a Sampler. The first `prompt` ids are not the answer's; with a `reader`, nor is what comes before the
    end of the reasoning, as the tokenizer `reader` writes it."""

    def __init__(self, matcher: Any, prompt: int, reader: Any = None) -> None:
        self._matcher, self._seen, self._reader = matcher, prompt, reader

    def __call__(self, ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Ids [T] and scores [1, V] -> scores [1, V], -inf where a token is not allowed. Raises PromptError when the
        schema turns out to be too complicated."""
        if self._reader is not None and not self._reasoned(ids):
            return scores
        for token in ids[self._seen :]:
            self._matcher.consume_token(token)
        self._seen = len(ids)
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise refused(self._matcher.get_error())
        allowed = np.zeros(scores.shape[-1], bool)
        known = np.unpackbits(found, bitorder="little")[: len(allowed)]
        allowed[: len(known)] = known
        return scores.masked_fill(to_device(~allowed, scores.device), -torch.inf)

    def _reasoned(self, ids: Sequence[int]) -> bool:
        """Whether the reasoning has ended; what follows it is the answer."""
        drawn = ids[max(self._seen, len(ids) - TAIL) :]
        if THOUGHT not in self._reader.decode(list(drawn)):
            return False
        self._reader, self._seen = None, len(ids)
        return True


class Constraints:
    """Makes the constraints of one model's answers."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def of(self, sampling: Sampling, prompt: int) -> Constraint:
        """The constraint of an answer after `prompt` tokens to the schema or grammar of its request. Raises PromptError
        for one that cannot be kept to."""
        grammar = require(sampling)
        made = library()(self._vocabulary, grammar, log_level=0)
        if made.is_error():
            raise refused(made.get_error())
        return Constraint(made, prompt, self._prompt.tokenizer if self._prompt.opens_reasoning else None)

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokenizer as the library has it, made once."""
        from llguidance.hf import from_tokenizer

        if not self._prompt.ends:
            raise PromptError(NO_END)
        try:
            return from_tokenizer(self._prompt.tokenizer, eos_token=sorted(self._prompt.ends))
        except ValueError:  # it is none of those that the library reads
            raise PromptError(NO_END) from None
