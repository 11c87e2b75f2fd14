"""Substitutes, one small file each; importing this package registers them, without torch.

`plain.select` and `batch.select` make the choice, for one token and for many."""

from importlib import import_module

from core.policy.substitute.base import Ask, Candidates, Chosen, Gates, Given, Substitute

for _name in "buddy cache_prior predicted random router_ranked similar".split():
    import_module(f"{__name__}.{_name}")

__all__ = ["Ask", "Candidates", "Chosen", "Gates", "Given", "Substitute"]
