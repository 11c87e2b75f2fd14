"""The binary form of a `Frame` that /live/frame sends, made for typed arrays in the browser.

    uint32 little-endian   length of the header that follows, so that what comes after it is 4-byte aligned
    JSON header            the frame's scalars; `arrays`: name, dtype, shape, byte offset from the end of the header,
                           and label and unit of a metric that no panel draws by itself
    arrays                 little-endian, each 4-byte aligned

An undefined number (no hit rate yet) is null in the header and NaN in an array. `coactivation` is sent as uint8 on a
log scale, 0 = never together, 255 = `coactivation_max` times: value = round(255 log(1 + count) / log(1 + max)).

`mark_texts` has the text of each of `marks` in the words of the page.

`limit` has the scalars of a `SpeedLimit` under that name, its `names` in order, and "limit.by_pass" [names, N].

`lossy` is null while all lossy options are off. Else its scalars stand in the header under that name, its arrays have
names like "lossy.delta", and `lossy.buddies`, where there are any, is sent as uint8: 0 = never, n = n / 255 of
`lossy.buddies_max`."""

import json
import math
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from app.wording import describe_change
from core.metrics import BY_NAME
from core.metrics.limit import PARTS, SpeedLimit
from core.metrics.lossy_events import LossyLook
from core.types import Frame, Memory, ModelShape

Array = npt.NDArray[Any]
PLAIN = ("per_layer", "tae", "threshold", "delta", "beta")  # arrays of a LossyLook that are sent unchanged


def encode(frame: Frame | None, **extra: object) -> bytes:
    """Pack a frame with `extra` header fields; without a frame (no model loaded) the header alone."""
    head: dict[str, object] = {}
    arrays: dict[str, Array] = {}
    for field in fields(frame) if frame is not None else ():
        value = getattr(frame, field.name)
        if field.name == "columns":
            arrays |= value
        elif field.name == "marks":
            head |= {"marks": value, "mark_texts": [describe_change(text) for _, text in value]}
        elif isinstance(value, np.ndarray):
            arrays[field.name] = value
        elif isinstance(value, SpeedLimit):
            head[field.name], arrays["limit.by_pass"] = {**value.facts(), "names": PARTS}, value.by_pass
        elif isinstance(value, LossyLook):
            head[field.name], changed = _lossy(value)
            arrays |= {f"{field.name}.{name}": array for name, array in changed.items()}
        else:
            head[field.name] = _plain(value) if isinstance(value, ModelShape | Memory) else value
    if "coactivation" in arrays:
        head["coactivation_max"], arrays["coactivation"] = log_scale(arrays["coactivation"])
    listed, offset = [], 0
    for name, array in arrays.items():
        listed.append(
            {"name": name, "dtype": _name(array.dtype), "shape": list(array.shape), "offset": offset, **_label(name)}
        )
        offset += _aligned(array.nbytes)
    text = json.dumps(
        {k: _finite(v) for k, v in {**head, **extra, "arrays": listed}.items()}, allow_nan=False, separators=(",", ":")
    ).encode()
    text = text.ljust(_aligned(len(text)))
    body = b"".join(_little(array).ljust(_aligned(array.nbytes), b"\0") for array in arrays.values())
    return len(text).to_bytes(4, "little") + text + body


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and the arrays; the inverse of `encode` for tests and scripts (browsers have their own)."""
    start = 4 + int.from_bytes(data[:4], "little")
    head = json.loads(data[4:start])
    arrays = {}
    for one in head["arrays"]:
        count = math.prod(one["shape"])
        dtype = np.dtype(one["dtype"]).newbyteorder("<")
        arrays[one["name"]] = np.frombuffer(data, dtype, count, start + one["offset"]).reshape(one["shape"])
    return head, arrays


def log_scale(counts: Array) -> tuple[int, npt.NDArray[np.uint8]]:
    """The largest count, and all counts on a log scale from 0 to 255."""
    top = int(counts.max(initial=0))
    if top == 0:
        return 0, np.zeros(counts.shape, np.uint8)
    return top, np.rint(np.log1p(counts, dtype=np.float32) * np.float32(255 / np.log1p(top))).astype(np.uint8)


def share_scale(shares: Array) -> tuple[float, npt.NDArray[np.uint8]]:
    """The largest of some non-negative numbers, and all of them in 255ths of it; only 0 maps to 0."""
    top = float(shares.max(initial=0.0))
    if top <= 0.0:
        return 0.0, np.zeros(shares.shape, np.uint8)
    return top, np.ceil(shares.clip(0.0) * (255 / top) - 0.5).clip(shares > 0, 255).astype(np.uint8)


def _lossy(look: LossyLook) -> tuple[dict[str, object], dict[str, Array]]:
    """Scalars and arrays."""
    head: dict[str, object] = {"rate": look.rate, "assignments": look.assignments, "buddies_max": None}
    arrays: dict[str, Array] = {name: getattr(look, name) for name in PLAIN}
    if look.buddies is not None:
        head["buddies_max"], arrays["buddies"] = share_scale(look.buddies)
    return head, arrays


def _plain(value: ModelShape | Memory) -> dict[str, int]:
    return {name: getattr(value, name) for name in value.__slots__}


def _label(name: str) -> dict[str, str]:
    one = BY_NAME.get(name)
    return {"label": one.label, "unit": one.unit} if one is not None and one.label else {}


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy composes it anew each time


def _little(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
