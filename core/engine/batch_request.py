"""Requests that are answered together, and the pieces of their answers. Imports nothing heavy."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from core.settings.sampling import Sampling
from core.types import Asked, Piece

BATCH = 16  # sequences at a time, by default


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A prompt to answer; `key` names it in what comes back. `cancel` ends it alone. `reuse`: of a chat, as in
    `Engine.generate`: it joins at once, and goes on from a kept KV if no other one does; `reading` gets the progress
    over its prompt."""

    key: Hashable
    messages: Asked
    sampling: Sampling
    cancel: threading.Event | None = None
    reuse: bool = False
    reading: Callable[[Piece], None] | None = None


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """A piece of the answer to the request `key`. `error`: why it has no answer, in the user's words; then nothing else
    comes of it. Pieces of one pass have the same step record."""

    key: Hashable
    piece: Piece | None = None
    error: str = ""
    refused: bool = False  # the error lies in the request
    too_long: bool = False  # ... whose prompt the context cannot hold


class Regrouped(NamedTuple):
    """What dividing sequences into two batches took, and the experts a layer that a batch is expected to need: in the
    order of arrival, and as they were divided."""

    ms: float
    arrival: float
    chosen: float
