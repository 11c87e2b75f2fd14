"""Substitutes, one small file each; importing this package registers them, without torch.

`plain.select` and `batch.select` make the choice, for one token and for many."""

from core.policy.substitute import buddy, cache_prior, predicted, random, router_ranked, similar
from core.policy.substitute.base import Ask, Candidates, Chosen, Gates, Given, Substitute

__all__ = [
    "Ask",
    "Candidates",
    "Chosen",
    "Gates",
    "Given",
    "Substitute",
    "buddy",
    "cache_prior",
    "predicted",
    "random",
    "router_ranked",
    "similar",
]
