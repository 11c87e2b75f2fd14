"""A layer's router, others that are asked about its state, and where the experts are that they choose."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from core.memory.codec.fast.steps import Steps, Work, named, some
from core.policy.predict.base import RouterPlan
from core.runtime.program import look, route
from core.runtime.program.feed_forward import Routed
from core.runtime.program.mixer import Pass


class Answers(NamedTuple):
    """What the routers of some MoE `layers` choose, given the router input of one row in another layer."""

    layers: tuple[int, ...]
    logits: torch.Tensor  # [n, E] fp32
    ids: torch.Tensor  # [n, k] int64


def choose(steps: Steps, rest: Routed, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """The experts [T, k] of all rows and their weights, from a router's logits [T, E]."""
    at = {"logits": logits, "ids": ids, "weights": weights}
    if rest.correction is not None:
        at["bias"] = rest.correction
    if rest.beside is not None:
        at["scales"] = rest.beside.scales
    steps.add(Work(route.kernel(rest.route), named(route.FIELDS, **at), len(logits), some(len(logits))))


def find(steps: Steps, rest: Routed, ids: torch.Tensor, table: int) -> int:
    """Look up one row's experts [k] of a layer; the run of steps ends there if one is in no slot -> where the slots'
    addresses are written. `table`: where the address of the table of all slots is."""
    rule, slots = rest.route, steps.put([0] * rest.route.chosen)
    first = rest.site.index * rule.experts
    given = named(look.FIELDS, ids=ids, first=first, table=table, slots=slots, stop=steps.stop)
    steps.add(Work(look.kernel(rule.chosen), given, 1, 1))
    return slots


def ask(to: Pass, plan: RouterPlan, rests: Sequence[Routed], at: int, states: torch.Tensor) -> Answers | None:
    """Ask the routers of the plan for the MoE layer `at`, given the input [1, H] of its own. None: there is none."""
    last = at + 1 == len(rests)
    layers = (0,) if last and plan.last == "state" else tuple(range(at + 1, min(at + 1 + plan.distance, len(rests))))
    if not layers:
        return None
    rule, asked = rests[0].route, [rests[layer] for layer in layers]
    logits = torch.empty(len(layers), rule.experts)
    ids, weights = torch.empty(len(layers), rule.chosen, dtype=torch.int64), to.scratch("asked", rule.chosen)
    rows = [logits[i : i + 1] for i in range(len(layers))]
    to.product([rest.router for rest in asked], states, rows)
    for rest, row, chosen in zip(asked, rows, ids, strict=True):
        choose(to.steps, rest, row, chosen, weights)
    return Answers(layers, logits, ids)
