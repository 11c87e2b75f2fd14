"""Validates every head and every frame of a trace file before it is used."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from core.profile.trace.chunk import BESIDE, RANKED, Chunk, beside_map_type, map_type
from core.settings.migration import migrated_params
from core.settings.param import Value

UNPACKED_BYTES = 4 << 30  # most unpacked bytes of the arrays of one frame, or of an `.npz`


class TooLarge(ValueError):
    """Arrays larger than any trace's; the message is the end of a sentence."""


def require_bounded(file: BinaryIO | Path) -> None:
    """Raises TooLarge when the arrays of an `.npz` exceed UNPACKED_BYTES, zipfile.BadZipFile when it is
    not a zip file."""
    with zipfile.ZipFile(file) as packed:
        size = sum(one.file_size for one in packed.infolist())
    if size > UNPACKED_BYTES:
        raise TooLarge(f"its arrays have {size:,} bytes, and those of a trace {UNPACKED_BYTES:,} at most")


def whole(value: object, most: int) -> int:
    """Checks a count from 1 to `most`. Raises ValueError for anything else."""
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError
    return value


def text(value: object) -> str:
    """Checks a text. Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError
    return value


def predictor_of(stated: Any) -> tuple[str, dict[str, Value]] | None:
    """The predictor that made the recorded predictions: its name and parameters, under today's names. Raises
    ValueError, KeyError or TypeError."""
    if stated is None:
        return None
    params: Any = stated["params"]
    if not isinstance(params, dict) or not all(isinstance(one, bool | int | float | str) for one in params.values()):
        raise ValueError
    name = text(stated["name"])
    return name, migrated_params(name, params)


def predictors_of(stated: Any) -> tuple[tuple[str, dict[str, Value]], ...]:
    """The predictors that were asked beside the one in use. Raises ValueError, KeyError or TypeError."""
    if not isinstance(stated, list | None) or None in (found := [predictor_of(one) for one in stated or ()]):
        raise ValueError
    return tuple(one for one in found if one is not None)


def problem_of(chunk: Chunk, shape: tuple[int, int, int], experts: int, beside: int) -> str:
    """What is wrong with the arrays of a frame whose ids should have this shape [tokens, layers, k], or "". `beside`:
    how many predictors were asked beside the one in use."""
    (tokens, layers, _), ids, passes = shape, chunk.ids, chunk.sizes.size
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {
        "ids": ("iu", shape),
        "sizes": ("iu", (passes,)),
        "decode": ("b", (passes,)),
        "rid": ("iu", (passes,)),
        "tok": ("iu", (tokens,)),
        "weights": ("f", shape),
        "probs": ("f", (tokens, layers, experts)),
    }
    for name, (kinds, sides) in wanted.items():
        array = getattr(chunk, name)
        if array is not None and (array.dtype.kind not in kinds or array.shape != sides):
            return f"a frame does not have the shape it says ({name} is {array.dtype} {list(array.shape)})"
        if array is not None and kinds == "f" and not np.isfinite(array).all():
            return f"{name} has numbers that are infinite or none"
    if (chunk.sizes <= 0).any() or int(chunk.sizes.sum()) != tokens:
        return "a frame does not have as many tokens as it says"
    if tokens and not 0 <= int(ids.min()) <= int(ids.max()) < experts:
        return "it names an expert that the model does not have"
    bounds = {"of": (0, passes), "at": (-1, layers), "layer": (0, layers)}
    if chunk.ranked is not None and not _sound(chunk.ranked, RANKED, bounds | {"expert": (0, experts)}):
        return "it has predictions for layers or experts that do not exist"
    by = {"by": (0, beside)}
    if chunk.beside is not None and not _sound(chunk.beside, BESIDE, bounds | by | {"expert": (0, experts)}):
        return "it has predictions for layers or experts, or by predictors, that do not exist"
    for maps, kind, within in (
        (chunk.maps, map_type(experts), bounds),
        (chunk.beside_maps, beside_map_type(experts), bounds | by),
    ):
        if maps is not None and not _sound(maps, kind, within):
            return "it has maps of layers that do not exist"
        if maps is not None and not ((maps["distribution"] >= 0.0) & (maps["distribution"] <= 1.01)).all():
            return "it has maps that are no probabilities"  # with rounding
    return ""


def _sound(rows: npt.NDArray[Any], kind: np.dtype[Any], bounds: Mapping[str, tuple[int, int]]) -> bool:
    return (
        rows.dtype == kind
        and rows.ndim == 1
        and all(((low <= rows[name]) & (rows[name] < high)).all() for name, (low, high) in bounds.items())
    )
