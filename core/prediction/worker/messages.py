"""Messages to and from a worker process, over its pipes: plain numbers and text, never objects.

uint32, uint32   little-endian: bytes of the head, bytes of the arrays
head             JSON; `arrays`: name, dtype, shape of each
arrays           one after the other, little-endian
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Head = dict[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]
LENGTHS = struct.Struct("<II")


def write(stream: BinaryIO, head: Head, arrays: Arrays | None = None) -> None:
    """Send one message. Raises OSError when the reader has closed the pipe."""
    arrays = arrays or {}
    listed = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    body = b"".join(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values())
    text = json.dumps({**head, "arrays": listed}).encode()
    stream.write(LENGTHS.pack(len(text), len(body)) + text + body)
    stream.flush()


def read(stream: BinaryIO) -> tuple[Head, dict[str, npt.NDArray[Any]]]:
    """Receive one message. Raises EOFError at the end of the stream."""
    texts, size = LENGTHS.unpack(_exactly(stream, LENGTHS.size))
    head, body = json.loads(_exactly(stream, texts)), _exactly(stream, size)
    arrays, at = {}, 0
    for name, kind, shape in head.pop("arrays"):
        dtype, count = np.dtype(kind).newbyteorder("<"), math.prod(shape)
        arrays[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return head, arrays


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
