"""A router's rule for the gate weights of arbitrary experts, inferred from its outputs, independent of model names.

Three scores cover the routers that transformers' experts interface supports: the softmax over all experts, the sigmoid
of each, and either of them normalised over the selected experts (for the softmax that is the softmax over the
selected). Each is multiplied by a constant. Correction biases and expert groups affect the selection only, not the
weights.
"""

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from core.errors import ModelError
from core.hf.discover import ExpertsSite, RouterOutput, read_router

Score = Literal["softmax", "sigmoid"]
LEAST = 2  # tokens: with one, every unnormalised rule fits with some constant
ROUNDING = 8.0  # units in the last place: tolerance for a router's own order of operations
DIGITS = 4  # maximum digits of a constant, if such a value is within the measurement's precision
TOKENS = 32  # used to find a router's rule ...
LOUDNESS = 2.0  # ... with states scaled up to this multiple of a norm's output


@dataclass(frozen=True, slots=True)
class Rule:
    """`score` of the logits, divided by its sum over a token's experts if `normalised`, times `scale`; as `dtype`."""

    score: Score
    normalised: bool
    scale: float
    dtype: torch.dtype

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[T, E] fp32: score of every expert from the router's logits [T, E], neither normalised nor scaled."""
        return logits.float().softmax(-1) if self.score == "softmax" else logits.float().sigmoid()

    def weigh(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, k] the weights that the router would give the experts `ids` [T, k], had it selected them, from its
        logits."""
        return self._weights(logits, ids).to(self.dtype)

    def _weights(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.score == "softmax" and self.normalised:  # numerically safe also where all of them are unlikely
            weights = logits.float().gather(-1, ids).softmax(-1)
        else:
            weights = self.scores(logits).gather(-1, ids)
            if self.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
        return weights if self.scale == 1.0 else weights * self.scale


def rule_of(output: RouterOutput) -> Rule | None:
    """The rule that reproduces this call's weights within rounding, the closest if there are several; None where none
    does. With one expert per token a constant weight is 1 times any normalised score.

    Raises ValueError for fewer tokens than are needed to identify the rule.
    """
    if len(output.ids) < LEAST:
        raise ValueError(f"a rule shows in {LEAST} tokens or more")
    found = [
        fit
        for score in get_args(Score)
        for normalised in (True, False)
        if (fit := _fit(score, normalised, output)) is not None
    ]
    return min(found, key=lambda fit: fit[0])[1] if found else None


def rules_of(model: Any, sites: Sequence[ExpertsSite]) -> tuple[Rule | None, ...]:
    """The rule of every layer, from router calls on random states: runs no pass, fires no hooks, callable from any
    thread."""
    embedding = model.get_input_embeddings().weight
    drawn = torch.randn(TOKENS, embedding.shape[-1], generator=torch.Generator().manual_seed(0))
    loudness = torch.linspace(LOUDNESS / TOKENS, LOUDNESS, TOKENS)[:, None]  # from nearly uniform to confident routing
    states = (drawn * loudness).to(embedding.device, embedding.dtype)
    return tuple(_ask(site, states) for site in sites)


@torch.no_grad()
def _ask(site: ExpertsSite, states: torch.Tensor) -> Rule | None:
    """The rule of one router from `states`, also of one that takes texts [1, T, H] alone. Arguments after the first
    come from the site's block by name (the bias of minimax_m2). None: a router with another call signature."""
    _, *more = inspect.signature(type(site.router).forward).parameters.values()
    own = {p.name: getattr(site.parent, p.name) for p in more[1:] if hasattr(site.parent, p.name)}
    for shaped in (states, states[None]):
        with suppress(ModelError, RuntimeError, TypeError, ValueError, IndexError):
            return rule_of(read_router(site, site.router.forward(shaped, **own)))
    return None


def _fit(score: Score, normalised: bool, output: RouterOutput) -> tuple[float, Rule] | None:
    """(mean relative error, the rule with its measured scale), or None if it does not reproduce the weights."""
    plain = Rule(score, normalised, 1.0, output.weights.dtype)
    ids, true = output.ids.long(), output.weights.double()
    unscaled = plain._weights(output.logits, ids).double()
    single = torch.finfo(torch.float32).eps
    unit = max(torch.finfo(output.weights.dtype).eps, single)
    scale = _short(float(true.sum() / unscaled.sum()), single + unit / math.sqrt(true.numel()))
    off = (true - unscaled * scale).abs() - torch.finfo(output.weights.dtype).tiny  # below the smallest normal number
    error = (off.clamp_min(0.0) / true.abs()).nan_to_num(0.0)
    if not bool(error.max() <= ROUNDING * unit):
        return None
    return float(error.mean()), Rule(score, normalised, scale, output.weights.dtype)


def _short(number: float, within: float) -> float:
    """The number with the fewest digits within the relative tolerance; itself, if none of up to DIGITS digits is."""
    rounded = (float(f"{number:.{digits}g}") for digits in range(1, DIGITS + 1))
    return next((short for short in rounded if abs(short - number) <= within * number), number)
