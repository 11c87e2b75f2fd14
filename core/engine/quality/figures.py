"""Divergence and agreement of two next-token distributions, and perplexity of an answer.

Distributions are softmax over the model's own logits; temperature and other sampling settings are left out, as they
change what is drawn, not the model's distribution.
"""

import math
from collections.abc import Sequence

import torch

FLOOR = -1e3  # nats: lower log-probabilities are raised to this, so that a divergence is finite


def divergence(exact: torch.Tensor, lossy: torch.Tensor) -> tuple[float, bool]:
    """KL(exact || lossy) in nats of two rows of logits [V], and whether they have the same likeliest token. fp32; equal
    rows give exactly 0. At most four fp32 rows are alive at once."""
    agrees = int(exact.argmax()) == int(lossy.argmax())
    p, q = exact.float().log_softmax(-1), lossy.float().log_softmax(-1).clamp_min_(FLOOR)
    terms = q.neg_().add_(p).mul_(p.exp())
    return max(0.0, float(terms.masked_fill_(p == -math.inf, 0.0).sum())), agrees  # impossible tokens add nothing


def log_probability(logits: torch.Tensor, token: int) -> float:
    """log p(token) in nats under logits [V], in fp32."""
    return float(logits[token].float() - logits.float().logsumexp(-1))


def perplexity(log_probabilities: Sequence[float]) -> float | None:
    """exp of the mean of -log p over some tokens."""
    if not log_probabilities:
        return None
    return math.exp(-sum(log_probabilities) / len(log_probabilities))
