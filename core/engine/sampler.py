"""Samples the next token with transformers' logits processors; it has its own generator, so a seed gives one answer."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.memory.to_device import to_device
from core.settings.sampling import Sampling
from core.types import TokenLogprob

Rule = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""Ids so far and scores [1, V] -> scores [1, V], -inf for tokens that are not allowed."""
Draw = Callable[[Sequence[int], torch.Tensor], int]
"""Ids so far and the last position's logits [1, V] -> the id of the next token."""


class PresenceFrequencyPenalty:
    """A logits processor: lowers the logits of tokens that the answer has already, by `presence` and by `frequency`
    for each time. The first `prompt` ids are not the answer's. Source: OpenAI's API reference, frequency_penalty."""

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self._presence, self._frequency, self._prompt = presence, frequency, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Ids [1, T] and scores [1, V] -> scores [1, V]."""
        said = ids[0, self._prompt :]
        times = torch.zeros_like(scores[0]).scatter_add_(0, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self._frequency * times - self._presence * (times > 0)


class Sampler:
    """Call with the ids so far and the last position's logits [1, V]; returns the next token's id. `prompt`: how many
    of the ids were given, and not drawn. `constraint` rules out tokens, before anything else. `drawn`: tokens of the
    answer that were drawn earlier; the generator is where it was after them."""

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        prompt: int = 0,
        constraint: Rule | None = None,
        drawn: int = 0,
    ) -> None:
        self._greedy = sampling.temperature == 0
        self._generator, self._drawn = torch.Generator(device).manual_seed(sampling.seed), drawn
        self._constraint, self._processors = constraint, LogitsProcessorList()
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
        if self._constraint is not None:
            scores = self._constraint(ids, scores.float())
        if self._processors:
            scores = self._processors(to_device([list(ids)], logits.device), scores.float())
        if self._greedy:
            return int(scores.argmax(-1))
        probs = scores.softmax(-1)
        for _ in range(self._drawn):  # a draw takes as many random numbers, whatever the probabilities
            drawn(probs, self._generator)
        self._drawn = 0
        return drawn(probs, self._generator)


def drawn(probs: torch.Tensor, generator: torch.Generator) -> int:
    """An index drawn with probabilities [1, V]: torch.multinomial's, which reads two checks back from the device before
    it draws. On a GPU the same is computed here, and one check is read back with the index."""
    if probs.device.type == "cpu":
        return int(torch.multinomial(probs, 1, generator=generator))
    found = (probs / torch.empty_like(probs).exponential_(1.0, generator=generator)).argmax(-1)
    index, total = torch.stack((found.double(), probs.double().sum(-1))).flatten().tolist()
    if not total > 0:  # NaN, or nothing has a probability
        raise RuntimeError("the probabilities of the next token are no numbers")
    return int(index)


LEAST = -9999.0  # stands for the logarithm of 0, which JSON cannot hold


class Logprobs:
    """A draw that draws as `draw` does, and keeps the log probability of each token beside those of the `top` likeliest
    ones: of the model's own distribution, before temperature and penalties."""

    def __init__(self, draw: Draw, tokenizer: PreTrainedTokenizerBase, top: int) -> None:
        self._draw, self._tokenizer, self._top = draw, tokenizer, top
        self._kept = deque[TokenLogprob]()

    def take(self) -> TokenLogprob:
        """That of the first token drawn whose was not taken yet."""
        return self._kept.popleft()

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        """Ids so far and the last position's logits [1, V] -> the id of the next token."""
        token = self._draw(ids, logits)
        scores = logits[0].float().log_softmax(-1).clamp_min(LEAST)
        likeliest = scores.topk(min(self._top, scores.shape[-1]))
        found = torch.cat((likeliest.values, scores[token : token + 1]))
        # read back at once: ids below 2^24 are whole numbers in fp32
        ids, (*values, own) = torch.stack((nn.functional.pad(likeliest.indices, (0, 1)).float(), found)).tolist()
        self._kept.append(
            TokenLogprob(
                self._tokenizer.decode([token]),
                own,
                tuple((self._tokenizer.decode([int(one)]), value) for one, value in zip(ids, values, strict=False)),
            )
        )
        return token
