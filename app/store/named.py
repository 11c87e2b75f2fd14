"""The experts that prefetchers predicted for the lab in a pass, as the bytes that the database keeps."""

import json
import zlib

import numpy as np

from core.metrics.record import ShadowPredictions
from core.profile.trace.chunk import BESIDE, beside_map_type

LEVEL = 1  # of zlib: a few thousand rows of small numbers, at every token
MOST = 256 << 20  # unpacked bytes of a pass


def packed(named: ShadowPredictions | None) -> bytes:
    """A line of JSON and the two arrays, compressed; b"" = nothing was recorded."""
    if named is None:
        return b""
    head = {"predictors": named.predictors, "ranked": len(named.ranked)}
    return zlib.compress(json.dumps(head).encode() + b"\n" + named.ranked.tobytes() + named.maps.tobytes(), LEVEL)


def unpacked(data: bytes, experts: int) -> ShadowPredictions | None:
    """The reverse. Raises ValueError, TypeError or KeyError for anything else."""
    if not data:
        return None
    try:
        stream = zlib.decompressobj()
        whole = stream.decompress(data, MOST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof:
        raise ValueError("it is cut short, or too long")
    line, _, arrays = whole.partition(b"\n")
    head = json.loads(line)
    end = head["ranked"] * BESIDE.itemsize
    return ShadowPredictions(
        tuple((str(name), dict(params)) for name, params in head["predictors"]),
        np.frombuffer(arrays[:end], BESIDE),
        np.frombuffer(arrays[end:], beside_map_type(experts)),
    )
