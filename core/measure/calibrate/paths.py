"""The routing-path predictor's training data (X, Y, R): texts with the experts of all their tokens, on disk meanwhile.

Source: ExpertFlow section 3.1.2, where X is given to the model, Y is what it writes, and R the experts of both."""

import heapq
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core.errors import ProfileError
from core.policy.predict.nets.path import Passage
from core.profile.trace.chunk import id_type
from core.system.wording import format_bytes

SEED = 0
SPARE_BYTES = 256 << 20  # of the disk, left for others


class _Kept(NamedTuple):
    """A text in the sample, the next to be dropped being the smallest: its `at` [first, last) tokens of the file."""

    key: float
    number: int
    ids: npt.NDArray[np.int32]
    prompt: int
    at: tuple[int, int]


class Paths:
    """A uniform sample of texts with at most `tokens` tokens in all, but at least one text.

    The experts are in a file without a name, which the system removes when it is closed or the process dies: L k bytes
    a token, twice that for models with more than 256 experts per layer. Of n tokens added, about tokens * (1 + log(n /
    tokens)) are written. Memory: 4 bytes a token; what is read of the file is the system's cache of it."""

    def __init__(self, layers: int, experts: int, top_k: int, tokens: int, folder: Path | None = None) -> None:
        """`folder`: on the disk to use; None = the system's folder for temporary files. Raises ProfileError when it has
        not enough room."""
        self._type, self._row = id_type(experts), (layers, top_k)
        self._row_bytes = np.dtype(self._type).itemsize * layers * top_k
        check_disk(tokens, self._row_bytes, folder)
        self._most, self._written, self._added = tokens, 0, 0
        self.tokens = 0  # of the texts in the sample
        self._random = np.random.default_rng(SEED)
        self._kept: list[_Kept] = []
        try:
            self._file = tempfile.TemporaryFile(prefix="moestro-", dir=folder)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise _unwritable(error) from error

    @property
    def left(self) -> int:
        """How many more tokens there is room for."""
        return max(0, self._most - self.tokens)

    def add(self, tokens: npt.NDArray[np.integer], ids: npt.NDArray[np.integer], prompt: int) -> None:
        """Add a text's tokens [T] and choices [T, L, k]; its first `prompt` tokens are the prompt. Raises ProfileError
        when the disk is full."""
        self._added += 1
        at = self._written, self._written + len(tokens)
        one = _Kept(float(self._random.random()), self._added, tokens.astype(np.int32), prompt, at)
        heapq.heappush(self._kept, one)
        self.tokens += len(tokens)
        while self.tokens > self._most and len(self._kept) > 1:
            gone = heapq.heappop(self._kept)
            self.tokens -= len(gone.ids)
            if gone is one:
                return
        try:
            self._file.write(ids.astype(self._type).tobytes())
        except OSError as error:
            raise _unwritable(error) from error
        self._written += len(tokens)

    def passages(self) -> list[Passage]:
        """The sampled texts, in the order they were added. Their experts are read from the file when they are used, so
        only until `close`."""
        if not self._written:
            return []
        self._file.flush()
        routes = torch.from_numpy(np.memmap(self._file, self._type, "r+", shape=(self._written, *self._row)))
        return [
            Passage(one.ids[: one.prompt].tolist(), one.ids.tolist(), routes[slice(*one.at)])
            for one in sorted(self._kept, key=lambda kept: kept.number)
        ]

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


def check_disk(tokens: int, row_bytes: int, folder: Path | None) -> None:
    """Raises ProfileError when a folder's disk has not enough room for so many tokens and SPARE_BYTES."""
    where = folder or Path(tempfile.gettempdir())
    free = shutil.disk_usage(where).free
    if tokens * row_bytes + SPARE_BYTES > free:
        fits = max(0, free - SPARE_BYTES) // row_bytes
        raise ProfileError(
            f"Training the routing-path predictor on {tokens:,} tokens needs {format_bytes(tokens * row_bytes)} of "
            f"disk, but only {format_bytes(free)} are free in {where}. Make room, set path_tokens to at most {fits:,}, "
            "or leave the routing path out."
        )


def _unwritable(error: OSError) -> ProfileError:
    return ProfileError(
        f"The routing-path predictor's training data cannot be kept on disk: {error.strerror or error}. Make room "
        "there, lower path_tokens, or leave the routing path out."
    )
