"""Results as text: columns as wide as their cells, and goals."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WORDS = {True: "kept", False: "MISSED", None: "not measured"}


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of columns: the first is flush left, the others flush right; without heads ("" each) the first line is
    left out."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    shown = lines if any(heads) else lines[1:]
    return [
        indent
        + "  ".join(c.ljust(w) if not at else c.rjust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in shown
    ]


def cell(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    """A figure, "-" where there is none."""
    return "-" if value is None else format(value / scale, form)


def cells(row: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The figures of a row that `forms` names, "-" for those it lacks."""
    return [cell(row.get(name), form) for name, form in forms.items()]


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
