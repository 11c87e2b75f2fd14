"""The suites of `launch.py bench`: where each stands, and its options. Imports nothing heavy: the command line reads
it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.harness.run import Suite

SUITES = {  # name -> folder, options
    "quick": ("speed", "model budget rounds tokens dtype peers small"),
    "tiers": ("speed", "rounds tokens formats budgets peers keep small"),
    "peers": ("speed", "rounds tokens formats lengths arithmetics peers coded keep small"),
    "predictors": ("routing", "model tokens small"),
    "estimator": ("routing", "model tokens small"),
    "methods": ("routing", "model tokens keep small"),
    "expert_maps": ("routing", "model tokens small"),
    "buddies": ("routing", "model profile small"),
    "path": ("routing", "model minutes tokens keep small"),
    "overhead": ("routing", "model rounds tokens small"),
    "lossy": ("quality", "model questions tokens rounds keep small"),
    "systems": ("quality", "model budgets rounds tokens questions preset keep small"),
    "distance": ("quality", "model formats tokens small"),
    "invariance": ("quality", "model prompts small"),
    "auto": ("speed", "model budgets rounds tokens drawn keep small"),
    "prefill": ("speed", "rounds lengths peers keep small"),
    "split": ("speed", "model budget rounds tokens keep small"),
    "batch": ("speed", "model rounds tokens keep small"),
    "dispatch": ("speed", "rounds tokens small"),
    "host": ("speed", "model budget rounds tokens small"),
    "speculation": ("speed", "model budgets rounds tokens keep small"),
    "share": ("speed", "model budget rounds tokens small"),
}


def suite(name: str) -> Suite:
    """The suite of this name, loaded now."""
    found: Any = import_module(f"bench.{SUITES[name][0]}.{name}").SUITE
    suite: Suite = found
    return suite


def having(option: str) -> str:
    """The suites with an option, as its help names them."""
    names = [name for name, (_, options) in SUITES.items() if option in options.split()]
    lacking = [name for name in SUITES if name not in names]
    return f"all but {' and '.join(lacking)}" if len(lacking) < 4 else ", ".join(names)
