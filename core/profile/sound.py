"""Validates the content of a profile file before anything is built from it."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

SIZES = {"layers": 10_000, "experts": 2**15, "top_k": 2**15, "hidden": 2**20}
WORDS = ("model", "model_hash", "source", "created")
TIMES = ("att", "moe", "head", "load")
NETS = ("estimator", "path")
TOGETHER = (
    ("pairs", "pairs_weighted"),
    ("gate_recall", "similarity"),
    ("maps", "map_keys"),
    ("curve_hit", "curve_chosen", "curve_cached"),
)  # arrays of one part
UNPREDICTED = ("gate_recall", "default_recall")  # their first is NaN: no layer comes before it


def check_head(head: Mapping[str, Any]) -> None:
    """Raises ValueError with the end of a sentence, or KeyError for a missing entry."""
    for name, most in SIZES.items():
        if type(head[name]) is not int or not 1 <= head[name] <= most:
            raise ValueError(f"it has {str(head[name])[:20]} {name}")
    if type(head["tokens"]) is not int or head["tokens"] < 0:
        raise ValueError("it does not say on how many tokens it was measured")
    for name in WORDS:
        if not isinstance(head[name], str):
            raise ValueError(f"its {name} is no text")
    if not isinstance(head["settings"], dict):
        raise ValueError("its settings are not a list of names and values")
    times = head["times"]
    if times is not None and (not isinstance(times, dict) or any(not _is_time(times.get(name)) for name in TIMES)):
        raise ValueError("its times are not milliseconds")


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """Raises ValueError for values that calibration cannot have measured. Shapes are checked before."""
    for names in TOGETHER[1:]:
        if len({name in arrays for name in names}) > 1:
            raise ValueError(f"it does not have all of {' and '.join(names)}")
    for more, one in (("pairs_weighted", "pairs"), ("tae_tempered", "tae"), ("default_recall", "gate_recall")):
        if more in arrays and one not in arrays:
            raise ValueError(f"it has only one of {one} and {more}")
    if "maps" in arrays and len(arrays["maps"]) != len(arrays["map_keys"]):
        raise ValueError("maps and map_keys are not equally many")
    for name, array in arrays.items():
        kind = array.dtype.kind
        bad = np.isnan(array) if name == "defaults" else ~np.isfinite(array) if kind == "f" else None
        if bad is not None and (bad[1:] if name in UNPREDICTED else bad).any():
            raise ValueError(f"{name} has numbers that are infinite or none")
    if "counts" in arrays and (arrays["counts"] < 0).any():
        raise ValueError("it counts fewer than no tokens")
    for name in TOGETHER[-1] if TOGETHER[-1][0] in arrays else ():
        if not ((arrays[name] >= 0) & (arrays[name] <= 1)).all():
            raise ValueError(f"{name} has shares that are none")
    if "curve_hit" in arrays and arrays["curve_cached"].shape[2:] != arrays["curve_chosen"].shape[1:]:
        raise ValueError("curve_chosen and curve_cached are not of equally many predictions")
    if "peaks" in arrays and (arrays["peaks"] < 0).any():
        raise ValueError("peaks has sizes below 0")


def check_nets(settings: Mapping[str, Any], names: Collection[str], *, defaults: bool) -> None:
    """Checks that trained networks, by the names of their weights, have their sizes in the settings, and an estimator
    of quasi-hidden states the default vectors that these are made of. Raises ValueError."""
    for net in NETS:
        if any(name.startswith(f"{net}.") for name in names):
            counts = settings.get(net)
            if not isinstance(counts, dict) or not all(type(value) is int and value >= 0 for value in counts.values()):
                raise ValueError(f"the sizes of {net} are missing")
            if counts.get("quasi") and not defaults:
                raise ValueError(f"the default vectors that {net} needs are missing")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
