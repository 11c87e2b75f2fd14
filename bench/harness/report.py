"""Results as text: ratios, headlines, and goals."""

from collections.abc import Iterable, Mapping
from typing import Any

from core.system.wording import cell

WORDS = {True: "kept", False: "MISSED", None: "not measured"}


def interval(ratio: Mapping[str, float | None] | None) -> str:
    """A `bench.harness.paired.Ratio` as a result has it."""
    if ratio is None:
        return "-"
    between = f" ({cell(ratio['low'])}-{cell(ratio['high'])})" if ratio["low"] is not None else ""
    return cell(ratio["ratio"]) + between


def headline(result: Mapping[str, Any]) -> str:
    """The model and its shape."""
    active = f", {result['top_k']} active" if "top_k" in result else ""
    return f"{result['model']}: {result['layers']} layers of {result['experts']} experts{active}"


def goal(what: str, sign: str, asked: float, found: float | None) -> dict[str, Any]:
    """A goal and whether it is kept; None where it could not be measured."""
    kept = None if found is None else found >= asked if sign == ">=" else found <= asked
    return {"goal": what, "sign": sign, "asked": asked, "found": found, "kept": kept}


def goal_lines(goals: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"  {g['goal']}: {cell(g['found'], '.3g')} ({g['sign']} {g['asked']:g}) {WORDS[g['kept']]}" for g in goals]
