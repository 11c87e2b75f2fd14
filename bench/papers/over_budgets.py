"""What a result of `bench systems` says over its budgets: time by hit rate, and the least memory for a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isinf
from typing import Any

from bench.harness.report import verdict
from bench.papers.parts import BY_CLAIM, HOLDS, NO, OPEN, PART

Curve = Sequence[tuple[float, float]]  # (memory in bytes, ms a token), from the least memory to the most
PARTS = 4  # into which the range of measured times is cut for the times compared


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; None where one side does not vary."""
    left, right = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    middle = (len(pairs) - 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True))
    spread = sum((a - middle) ** 2 for a in left) * sum((b - middle) ** 2 for b in right)
    return float(products / spread**0.5) if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(one < value for one in values) + (sum(one == value for one in values) - 1) / 2 for value in values]


def ran(result: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """Budget -> figures of a system, from the least memory to the most, where it could run."""
    budgets = sorted(result["budgets"], key=lambda budget: float(result["budgets"][budget]["bytes"]))
    rows = {budget: result["systems"][name][budget] for budget in budgets}
    return {budget: row for budget, row in rows.items() if row.get("tpot_ms") is not None}


def hits_save_time(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Whether time falls as the hit rate rises, in each exact system over its budgets. The correlation over the systems
    at one budget is in the text, too: these differ in more than hits."""
    systems = {name: ran(result, name) for name in result["systems"]}
    exact = {
        name: {
            budget: (float(row["hit_rate"]), float(row["tpot_ms"]))
            for budget, row in rows.items()
            if row["hit_rate"] is not None
        }
        for name, rows in systems.items()
        if rows and all(row["exact"] for row in rows.values())
    }
    of_system = {name: correlation([*pairs.values()]) for name, pairs in exact.items()}
    known = [one for one in of_system.values() if one is not None]
    if not known:
        return None
    texts = [
        f"{name} " + ", ".join(f"{hits:.1%} {ms:.2f} ms" for hits, ms in pairs.values()) + f" (r {of_system[name]:.2f})"
        for name, pairs in exact.items()
        if of_system[name] is not None
    ]
    at_budgets = []
    for budget in result["budgets"]:
        found = correlation([pairs[budget] for pairs in exact.values() if budget in pairs])
        at_budgets += [] if found is None else [f"at {budget} {found:.2f}"]
    falls = [one <= -1 + 1e-9 for one in known]
    answer = HOLDS if all(falls) else PART if any(one < 0 for one in known) else NO
    return answer, (
        f"Hit rate and time per token over budgets, rank correlation r (-1: less time at every higher hit rate): "
        f"{'; '.join(texts)}. r is -1 in {sum(falls)} of {len(known)} exact systems. Over the systems at one budget, "
        f"which differ in more than hits: {', '.join(at_budgets) or 'none'}."
    )


def least(curve: Curve, target_ms: float) -> float:
    """The least memory in bytes for `target_ms` a token, by a straight line between the two budgets measured around it;
    the least budget where that is fast enough, infinite where none is."""
    if not curve:
        return inf
    if curve[0][1] <= target_ms:
        return curve[0][0]
    for (less, slow), (more, fast) in pairwise(curve):
        if fast <= target_ms:
            return less + (more - less) * (slow - target_ms) / (slow - fast)
    return inf


def least_memory(result: Mapping[str, Any], better: str, rivals: Sequence[str]) -> tuple[str, str] | None:
    """Whether `better` needs less memory than each of the rivals, at times evenly spread over those measured. Two
    systems that are both fast enough with the least budget, or both with none, are not compared."""
    names = (better, *rivals)
    if any(name not in result["systems"] for name in names):
        return None
    curves = {
        name: [
            (float(result["budgets"][budget]["bytes"]), float(row["tpot_ms"]))
            for budget, row in ran(result, name).items()
        ]
        for name in names
    }
    times = [ms for curve in curves.values() for _, ms in curve]
    if not times or not curves[better]:
        return None
    low, high = min(times), max(times)
    first = min(size["bytes"] for size in result["budgets"].values())
    rows, texts = list[list[float | None]](), list[str]()
    for part in range(1, PARTS):
        target = low + (high - low) * part / PARTS
        needs = {name: least(curve, target) for name, curve in curves.items()}
        open_ = [needs[better] == needs[rival] and (isinf(needs[rival]) or needs[rival] <= first) for rival in rivals]
        rows += [
            [None if same else needs[better], None if same else needs[rival]]
            for rival, same in zip(rivals, open_, strict=True)
        ]
        texts.append(
            f"for {target:.2f} ms " + ", ".join(f"{name} {_size(need, first)}" for name, need in needs.items())
        )
    measured = "; ".join(
        f"{name} " + ", ".join(f"{size / 1e6:.1f} MB {ms:.2f} ms" for size, ms in curve)
        for name, curve in curves.items()
    )
    answer = BY_CLAIM[verdict(rows, lower=True)]
    note = " None of these differ." if answer == OPEN else ""
    return answer, f"By interpolation between budgets: {'; '.join(texts)}.{note} Measured: {measured}."


def _size(need: float, first: float) -> str:
    """A need in MB; with the least budget measured, or more than the most, it is only a bound."""
    if isinf(need):
        return "more than was tried"
    return f"{'at most ' if need <= first else ''}{need / 1e6:.1f} MB"
