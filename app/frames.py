"""The binary form of a `Frame` that /live/frame sends, made for typed arrays in the browser.

    uint32 little-endian   length of the header that follows, so that what comes after it is 4-byte aligned
    JSON header            the frame's scalars; `arrays`: name, dtype, shape, byte offset from the end of the header
    arrays                 little-endian, each 4-byte aligned

A number that is not one (no hit rate yet) is null in the header and NaN in an array. `coactivation` is sent as uint8 on
a log scale, 0 = never together, 255 = `coactivation_max` times: value = round(255 log(1 + count) / log(1 + max)).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from core.types import Frame

Array = npt.NDArray[Any]


def encode(frame: Frame | None, **extra: object) -> bytes:
    """Pack a frame with `extra` header fields; without a frame (no model loaded) the header alone."""
    head: dict[str, object] = {}
    arrays: dict[str, Array] = {}
    for field in fields(frame) if frame is not None else ():
        value = getattr(frame, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = value
        else:
            head[field.name] = asdict(value) if field.name in ("shape", "memory") else value
    if "coactivation" in arrays:
        head["coactivation_max"], arrays["coactivation"] = log_scale(arrays["coactivation"])
    listed, offset = [], 0
    for name, array in arrays.items():
        listed.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "offset": offset})
        offset += _aligned(array.nbytes)
    text = json.dumps({k: _finite(v) for k, v in {**head, **extra, "arrays": listed}.items()}, allow_nan=False,
                      separators=(",", ":")).encode()
    text = text.ljust(_aligned(len(text)))
    body = b"".join(_little(array).ljust(_aligned(array.nbytes), b"\0") for array in arrays.values())
    return len(text).to_bytes(4, "little") + text + body


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and the arrays; what the browser does, for tests and scripts."""
    start = 4 + int.from_bytes(data[:4], "little")
    head = json.loads(data[4:start])
    arrays = {}
    for one in head["arrays"]:
        count = math.prod(one["shape"])
        dtype = np.dtype(one["dtype"]).newbyteorder("<")
        arrays[one["name"]] = np.frombuffer(data, dtype, count, start + one["offset"]).reshape(one["shape"])
    return head, arrays


def log_scale(counts: Array) -> tuple[int, npt.NDArray[np.uint8]]:
    """The largest count, and all of them on a log scale from 0 to 255."""
    top = int(counts.max(initial=0))
    if top == 0:
        return 0, np.zeros(counts.shape, np.uint8)
    return top, np.rint(np.log1p(counts, dtype=np.float32) * np.float32(255 / np.log1p(top))).astype(np.uint8)


def _little(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
