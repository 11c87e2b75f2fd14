"""The process beside the engine in which the shadow caches live, and the messages that it and the application exchange.

It reads one message after another from stdin and answers each on stdout; where stdin ends, so does it, however the
application ended. It runs at the lowest priority and imports no more than numpy and the simulator.

    uint32, uint32   little-endian: bytes of the head, bytes of the arrays
    head             JSON; `arrays`: name, dtype, shape of each
    arrays           one after the other, little-endian
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Head = dict[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]
LENGTHS = struct.Struct("<II")


def write(stream: BinaryIO, head: Head, arrays: Arrays | None = None) -> None:
    """Send one message. Raises OSError when nobody reads any more."""
    arrays = arrays or {}
    listed = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    body = b"".join(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values())
    text = json.dumps({**head, "arrays": listed}).encode()
    stream.write(LENGTHS.pack(len(text), len(body)) + text + body)
    stream.flush()


def read(stream: BinaryIO) -> tuple[Head, dict[str, npt.NDArray[Any]]]:
    """Receive one message. Raises EOFError where they end."""
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


class Shop:
    """Answers messages: `setup` begins anew, `forget` counts anew, arrays are passes, `report` asks for the figures."""

    def __init__(self) -> None:
        from core.registry import variants
        from core.simulate import regret
        from core.trace import Chunk

        self._regret, self._chunk, self._variants = regret, Chunk, variants
        self._shadows: Any = None

    def answer(self, head: Head, arrays: Arrays) -> Head:
        """What to send back: `problem` "" when all is well, `standing` when it was asked for and there is one."""
        started_s = time.perf_counter()
        if "setup" in head:
            known = {variant.name for variant in self._variants("eviction")}   # not those of somebody's own module
            told = {name: values for name, values in head["setup"]["policies"].items() if name in known}
            setup = self._regret.Setup(**{**head["setup"], "policies": told})
            self._shadows = self._regret.Shadows(setup, head["window"])
        if head.get("forget"):
            self._shadows.forget()
        if arrays:
            sizes = arrays["sizes"]
            chunk = self._chunk(arrays["ids"], sizes, arrays["decode"], np.zeros(len(sizes), np.int32))
            if head.get("warm"):
                self._shadows.warm(chunk)
            else:
                self._shadows.feed(chunk, arrays["hits"], arrays["requests"])
        standing = self._shadows.standing() if head.get("report") else None
        return {"problem": "", "standing": asdict(standing) if standing is not None else None,
                "spent_s": time.perf_counter() - started_s}


def main() -> None:
    """The life of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)   # Ctrl-C ends the application, and that ends this
    if hasattr(os, "nice"):                        # elsewhere it was started with a low priority
        os.nice(19)
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())   # what a library prints is not an answer
    shop = Shop()
    try:
        while True:
            head, arrays = read(source)
            try:
                answer = shop.answer(head, arrays)
            except Exception as error:
                answer = {"problem": str(error) or type(error).__name__, "details": traceback.format_exc()}
            write(answers, answer)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
