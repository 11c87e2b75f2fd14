"""Does an ordering claimed by a paper hold in figures measured here?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def verdict(rows: Sequence[Sequence[float | None]], lower: bool = False) -> str:
    """Whether every row falls strictly from first value to last (rises, where lower is better): "yes", "in part" when
    only some do, or "no"; rows that lack a value are ignored, and with no other rows it is "not measured"."""
    sign = -1.0 if lower else 1.0
    known = [[sign * value for value in row if value is not None] for row in rows if None not in row]
    holds = [all(a > b for a, b in pairwise(row)) for row in known]
    return "not measured" if not holds else "yes" if all(holds) else "in part" if any(holds) else "no"
