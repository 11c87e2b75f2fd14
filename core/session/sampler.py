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

Draw = Callable[[Sequence[int], torch.Tensor], int]
"""Ids so far and the last position's logits [1, V] -> the id of the next token."""


class Sampler:
    """Call with the ids so far and the last position's logits [1, V]; returns the next token's id."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature == 0
        self._generator = torch.Generator(device).manual_seed(sampling.seed)
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
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
