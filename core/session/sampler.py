"""Samples the next token with transformers' logits processors; it has its own generator, so a seed gives one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.settings.sampling import Sampling

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Ids [1, T] and scores [1, V] -> scores [1, V]."""
Draw = Callable[[Sequence[int], torch.Tensor], int]
"""Ids so far and the last position's logits [1, V] -> the id of the next token."""


class PresenceFrequencyPenalty:
    """A logits processor: lowers the logits of tokens that the answer has already, by `presence` and by `frequency`
    for each time. The first `prompt` ids are not the answer's. Source: OpenAI's API reference, frequency_penalty."""

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self._presence, self._frequency, self._prompt = presence, frequency, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Ids [1, T] and scores [1, V] -> scores [1, V]."""
        times = torch.bincount(ids[0, self._prompt :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self._frequency * times - self._presence * (times > 0)


class Sampler:
    """Call with the ids so far and the last position's logits [1, V]; returns the next token's id. `prompt`: how many
    of the ids were given, and not drawn. `constraint` rules out tokens, before anything else."""

    def __init__(
        self, sampling: Sampling, device: torch.device, prompt: int = 0, constraint: Processor | None = None
    ) -> None:
        self._greedy = sampling.temperature == 0
        self._generator = torch.Generator(device).manual_seed(sampling.seed)
        self._processors = LogitsProcessorList()
        if constraint is not None:
            self._processors.append(constraint)
        if sampling.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        if presence or frequency:
            self._processors.append(PresenceFrequencyPenalty(presence, frequency, prompt))
        if self._greedy:
            return
        self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._processors.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        scores = logits
        if self._processors:
            scores = self._processors(torch.tensor([ids], device=logits.device), logits.float())
        if self._greedy:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
