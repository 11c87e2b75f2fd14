"""Log probabilities of the tokens that are drawn, for whoever asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from core.session.sampler import Draw
from core.types import TokenLogprob

LEAST = -9999.0  # stands for the logarithm of 0, which JSON cannot hold


class Logprobs:
    """A draw that draws as `draw` does, and keeps the log probability of that token beside those of the `top` likeliest
    ones: of the model's own distribution, before temperature and penalties."""

    def __init__(self, draw: Draw, tokenizer: PreTrainedTokenizerBase, top: int) -> None:
        self._draw, self._tokenizer, self._top = draw, tokenizer, top
        self.last: TokenLogprob | None = None

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        """Ids so far and the last position's logits [1, V] -> the id of the next token."""
        token = self._draw(ids, logits)
        scores = logits[0].float().log_softmax(-1).clamp_min(LEAST)
        likeliest = scores.topk(min(self._top, scores.shape[-1]))
        found = torch.cat((likeliest.values, scores[token : token + 1]))
        # read back at once: ids below 2^24 are whole numbers in fp32
        ids, (*values, own) = torch.stack((nn.functional.pad(likeliest.indices, (0, 1)).float(), found)).tolist()
        self.last = TokenLogprob(
            self._tokenizer.decode([token]),
            own,
            tuple((self._tokenizer.decode([int(one)]), value) for one, value in zip(ids, values, strict=False)),
        )
        return token
