"""The messages to a reader of routing paths, and its answers."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
HEAD = struct.Struct("<q2i")  # of a message: its number, shares; of an answer the same; and its cells, L * E
SHARE = struct.Struct("<3i")  # request, whether it begins, how many tokens; then these, int32


class Share(NamedTuple):
    """The next tokens that the model is given of one request; `fresh`: nothing is known of it, or not to be used."""

    request: int
    fresh: bool
    tokens: Sequence[int]


class Answer(NamedTuple):
    """Of each share [n]: its request, the logarithm of the probability that none of its tokens requests an expert,
    [n, L * E], and which experts it is taken to need, [n, L * E]."""

    number: int
    requests: tuple[int, ...]
    idle: Singles
    active: Bools


def asked(number: int, shares: Sequence[Share]) -> bytes:
    """The message that the model is given these tokens in one pass."""
    parts = [HEAD.pack(number, len(shares), 0)]
    for request, fresh, tokens in shares:
        parts += [SHARE.pack(request, fresh, len(tokens)), np.array(tokens, "<i4").tobytes()]
    return b"".join(parts)


def question(message: bytes) -> tuple[int, list[Share]]:
    """(number, shares) of a message."""
    number, count, _ = HEAD.unpack_from(message)
    shares, at = [], HEAD.size
    for _ in range(count):
        request, fresh, size = SHARE.unpack_from(message, at)
        at += SHARE.size
        shares.append(Share(request, bool(fresh), np.frombuffer(message, "<i4", size, at).tolist()))
        at += 4 * size
    return number, shares


def answer(number: int, requests: Sequence[int], idle: Singles, active: Bools) -> bytes:
    """The message that answers one."""
    parts = np.array(requests, "<i4"), idle.astype("<f4", copy=False), np.packbits(active, axis=1)
    return HEAD.pack(number, *idle.shape) + b"".join(part.tobytes() for part in parts)


def answered(message: bytes) -> Answer:
    """What an answer says."""
    number, count, cells = HEAD.unpack_from(message)
    requests = tuple(np.frombuffer(message, "<i4", count, HEAD.size).tolist())
    idle = np.frombuffer(message, "<f4", count * cells, HEAD.size + 4 * count).reshape(count, cells)
    bits = np.frombuffer(message, np.uint8, offset=HEAD.size + 4 * count + idle.nbytes).reshape(count, -1)
    return Answer(number, requests, idle, np.unpackbits(bits, axis=1, count=cells).view(np.bool_))
