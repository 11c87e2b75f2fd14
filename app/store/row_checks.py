"""Validates values read from the database: SQLite keeps any type in any column, and other programs can edit the file.

Every function raises InvalidRow, a ValueError, whose text is the end of a sentence about the row."""

from collections.abc import Mapping
from typing import Any

from core.system.reading import BadJson, parse_json
from core.types import ModelShape

MOST = (1 << 63) - 1  # largest integer in a table of an export
YEAR_10000_S = 253402300800.0
WHOLE, FLAG, TEXT = ("whole",), ("flag",), ("text",)
NUMBER = ("whole", "fraction")
FIGURE = (*NUMBER, "none")
STATS = {  # displayed or exported fields of core.types.AnswerStats that every version wrote
    "prompt_tokens": WHOLE,
    "new_tokens": WHOLE,
    "ttft_ms": NUMBER,
    "tpot_ms": NUMBER,
    "tok_s": NUMBER,
    "hit_rate": FIGURE,
    "compute_ms": NUMBER,
    "stall_ms": NUMBER,
    "idle_ms": NUMBER,
    "exact": FLAG,
    "emulated": FLAG,
    "reason": TEXT,
}
LATER_STATS = {  # further fields, which earlier versions did not write
    "disk_misses": WHOLE,
    "disk_bytes": WHOLE,
    "changed": WHOLE,
    "assignments": WHOLE,
    "seed": WHOLE,
    "queued_ms": NUMBER,
    "unrecorded": WHOLE,
    "cached_tokens": WHOLE,
    "begun_tokens": WHOLE,
    "opens_reasoning": FLAG,
    "arithmetic": TEXT,
    "distance_kl": FIGURE,
    "distance_tokens": WHOLE,
}
QUALITY = {  # of core.engine.quality.report.Quality
    "scored": WHOLE,
    "kl": FIGURE,
    "kl_most": FIGURE,
    "agreement": FIGURE,
    "perplexity": FIGURE,
    "saved_ms": FIGURE,
    "note": TEXT,
}


class InvalidRow(ValueError):
    """A stored value that Moestro cannot have written."""


def fields(value: object, name: str) -> dict[str, Any]:
    """A column with a JSON object."""
    if not isinstance(value, str):
        raise InvalidRow(f"there is no text where its {name} should be")
    try:
        found = parse_json(value, nonfinite=True)
    except BadJson as error:
        raise InvalidRow(f"where its {name} should be, {error}") from None
    if not isinstance(found, dict):
        raise InvalidRow(f"there is no object where its {name} should be")
    return found


def stats_of(value: object) -> dict[str, Any] | None:
    """The statistics of an answer: the fields of AnswerStats, `queued_ms` and `sampling`; None where there are none."""
    if value is None:
        return None
    found = fields(value, "statistics")
    _require(found, STATS, "statistics")
    _require(found, {name: kinds for name, kinds in LATER_STATS.items() if name in found}, "statistics")
    sampling = found.get("sampling", {})
    if not isinstance(sampling, dict) or sampling and "seed" not in sampling:
        raise InvalidRow("its sampling is damaged")
    _require(sampling, {name: WHOLE if name in ("seed", "top_k") else NUMBER for name in sampling}, "sampling")
    return found


def quality_of(value: object) -> dict[str, Any] | None:
    """The quality score of an answer: the fields of Quality; None where it was not scored."""
    if value is None:
        return None
    found = fields(value, "quality")
    _require(found, QUALITY, "quality")
    if (found["kl"] is None) != (found["agreement"] is None):
        raise InvalidRow("its quality lacks a figure")
    return found


def shape_of(value: object) -> ModelShape:
    """The shape of a loaded model."""
    found = {"encoder_layers": 0, "heads": 0, **fields(value, "shape")}  # which older versions did not store
    names = set(ModelShape.__slots__)
    if set(found) != names:
        raise InvalidRow("its shape has other fields")
    _require(found, dict.fromkeys(names, WHOLE), "shape")
    return ModelShape(**found)


def text(value: object, name: str) -> str:
    """A column with text."""
    if not isinstance(value, str):
        raise InvalidRow(f"there is no text where its {name} should be")
    return value


def timestamp(value: object, name: str) -> float:
    """A column with a time: seconds since the epoch, of a year with four digits."""
    if not isinstance(value, (int, float)) or not 0 <= value < YEAR_10000_S:
        raise InvalidRow(f"its {name} is no time")
    return value


def _require(found: Mapping[str, Any], wanted: Mapping[str, tuple[str, ...]], what: str) -> None:
    for name, kinds in wanted.items():
        if name not in found or _kind(found[name]) not in kinds:
            raise InvalidRow(f"its {what} {'have an odd' if name in found else 'lack'} {name[:40]}")


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "whole" if abs(value) <= MOST else "huge"
    if isinstance(value, float):
        return "fraction"
    return "text" if isinstance(value, str) else "none" if value is None else "other"
