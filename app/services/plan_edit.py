"""A plan of the cache as a table that can be edited: what each layer keeps, in blocks of its experts."""

from __future__ import annotations

from collections.abc import Sequence

from app.services.plan_basis import Known
from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan, LayerBlocks
from core.policy.allocation.configurator import plan_given

Row = list[object]  # layer, memory in whole experts, part of an expert as "2/3"
NEAR = 0.02  # of a block: how far a number may be from a whole one, being written with few digits
DIGITS = 4


def table(plan: CachePlan, blocks: int) -> list[Row]:
    """One row a layer, rounded down to whole blocks as the engine does."""
    return [
        [
            layer,
            round(one.capacity / blocks, DIGITS),
            f"{one.top}/{blocks}" if 0 < one.top < blocks else str(one.top and 1),
        ]
        for layer, one in enumerate(plan.in_blocks(blocks))
    ]


def edited(known: Known, plan: CachePlan, rows: Sequence[Sequence[object]]) -> CachePlan:
    """The plan that the table of `plan` says now, with the waiting that the latency model expects of it; `plan` itself
    where nothing is changed. Raises SettingError, in the user's words, for what no cache of this budget can be."""
    layers, blocks = known.curves.layers, known.blocks
    if len(rows) != layers or any(len(row) != 3 for row in rows):
        raise SettingError(f"The table needs one row for each of the {layers} layers, with memory and part.")
    wanted = [
        LayerBlocks(_blocks(layer, memory, blocks, "experts"), _blocks(layer, part, blocks, "part"))
        for layer, (_, memory, part) in enumerate(rows)
    ]
    if tuple(wanted) == plan.in_blocks(blocks):
        return plan
    for layer, one in enumerate(wanted):
        _check(known, layer, *one)
    slots = [one.capacity / blocks for one in wanted]
    if (over := sum(slots) - known.rest) > 1e-6:
        buffer = " next to the prefetch buffer" if known.buffer else ""
        raise SettingError(
            f"The layers keep {sum(slots):.6g} experts together, but the budget has room for {known.rest}{buffer}. "
            f"Take {over:.6g} away."
        )
    return plan_given(known.curves, known.times, slots, [one.top / blocks for one in wanted])


def _check(known: Known, layer: int, mine: int, top: int) -> None:
    """Raises SettingError for a layer that cannot keep `mine` blocks with tops of `top` blocks."""
    blocks, experts = known.blocks, known.curves.experts
    if not 0 <= top <= blocks:
        raise SettingError(f"Layer {layer}: the part of an expert that stays is 0 to 1, not {top / blocks:.4g}.")
    if blocks == 1 and top != 1:
        raise SettingError(
            f"Layer {layer}: experts are whole, so that the part is 1. Load the model with several blocks per expert "
            "to keep parts."
        )
    if not known.least <= mine / blocks <= experts:
        uses = f", and a token uses {known.curves.top_k}" if known.least else ""
        raise SettingError(
            f"Layer {layer}: {mine / blocks:.6g} experts are not possible; it has {experts}{uses}. Choose "
            f"{known.least:g} to {experts}."
        )
    if mine > top * experts:
        raise SettingError(
            f"Layer {layer}: {top}/{blocks} of all its {experts} experts take the memory of "
            f"{top * experts / blocks:g}, so that {(mine - top * experts) / blocks:.6g} of the "
            f"{mine / blocks:.6g} would stay empty. Keep a larger part, or fewer experts."
        )
    if 0 < mine < top:
        raise SettingError(
            f"Layer {layer}: {mine / blocks:.4g} experts' memory has no room for {top}/{blocks} of one. Keep a smaller "
            "part, more memory, or 0."
        )


def _blocks(layer: int, value: object, blocks: int, what: str) -> int:
    """A number of experts, or a part of one, in whole blocks. Raises SettingError."""
    text = str("" if value is None else value).strip()
    above, slash, below = text.partition("/")
    try:
        number = float(above) / (float(below) if slash else 1.0)
        whole = round(number * blocks)
    except (ValueError, OverflowError, ZeroDivisionError):
        wanted = "number of experts" if what == "experts" else f"part of an expert, such as 1/{blocks} or 1"
        raise SettingError(f"Layer {layer}: “{text}” is not a {wanted}.") from None
    if abs(number * blocks - whole) > NEAR:
        unit = f"whole blocks, of which an expert has {blocks}" if blocks > 1 else "whole experts"
        raise SettingError(
            f"Layer {layer}: {text} is not possible, because memory is given in {unit}. The nearest is "
            f"{whole / blocks:.4g}."
        )
    return whole
