"""Training data on disk: records in a temporary file, read back in shuffled minibatches within bounded memory.

The file is gone with its handle: the system removes it when it is closed, and when the process dies."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.errors import ProfileError
from core.policy.predict.nets.estimator import Batch

BLOCK_BYTES = 1 << 20  # records are read in blocks of this size ...
POOL_BYTES = 64 << 20  # ... and mixed in as many of them as take this much memory

Records = npt.NDArray[Any]
"""[n] of a structured dtype: "layer" int16 = the layer whose routing is to be predicted, "probs" float16 [E] = its
router's distribution, and whatever its inputs are made of."""


class StateFile:
    """A file of training examples (`core.policy.predict.nets.estimator.Examples`).

    `inputs` makes the network's inputs [n, H], of a 16-bit float dtype, of records [n]. Memory: POOL_BYTES, one block,
    and what `inputs` takes for a block, while minibatches are read; else nothing."""

    def __init__(
        self, layout: np.dtype[Any], inputs: Callable[[Records], torch.Tensor], folder: Path | None = None
    ) -> None:
        """`folder`: on the disk to use; None = the system's folder for temporary files. Raises ProfileError."""
        self.count = 0  # examples
        self._layout, self._inputs = layout, inputs
        self._block = max(1, BLOCK_BYTES // layout.itemsize)  # records
        try:
            self._file = tempfile.TemporaryFile(prefix="moestro-", dir=folder)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise _unwritable(error) from error

    def write(self, records: Records) -> None:
        """Append records. Raises ProfileError when the disk is full."""
        try:
            self._append(records)
        except OSError as error:
            raise _unwritable(error) from error
        self.count += len(records)

    def _append(self, records: Records) -> None:
        self._file.write(records.tobytes())

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Every example once, in minibatches of `size`, the last one smaller. Blocks are taken in random order, and
        records are drawn at random from POOL_BYTES of blocks at a time, so that the disk is read in large pieces."""
        pooled = max(1, POOL_BYTES // (self._block * self._layout.itemsize))
        order = torch.randperm(-(-self.count // self._block), generator=generator)
        pool: _Pool | None = None
        for at in range(0, len(order), pooled):
            for block in order[at : at + pooled].tolist():
                layer, inputs, probs = self._read(block)
                if pool is None:
                    pool = _Pool(min(self.count, pooled * self._block + size), inputs, probs)
                pool.add(layer, inputs, probs)
            assert pool is not None
            yield from pool.drawn(size, generator, everything=at + pooled >= len(order))

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

    def _read(self, block: int) -> Batch:
        self._file.seek(block * self._block * self._layout.itemsize)
        number = min(self._block, self.count - block * self._block)
        records = np.frombuffer(self._file.read(number * self._layout.itemsize), self._layout)
        layer = torch.from_numpy(records["layer"].astype(np.int64))
        return Batch(layer, self._inputs(records), torch.from_numpy(records["probs"].copy()))


class _Pool:
    """Room for `rows` examples, which are drawn from it at random."""

    def __init__(self, rows: int, inputs: torch.Tensor, probs: torch.Tensor) -> None:
        self._layer = torch.empty(rows, dtype=torch.int16)
        self._inputs, self._probs = (torch.empty(rows, one.shape[1], dtype=one.dtype) for one in (inputs, probs))
        self._filled = 0

    def add(self, layer: torch.Tensor, inputs: torch.Tensor, probs: torch.Tensor) -> None:
        here = slice(self._filled, self._filled + len(layer))
        self._layer[here], self._inputs[here], self._probs[here] = layer, inputs, probs
        self._filled += len(layer)

    def drawn(self, size: int, generator: torch.Generator, *, everything: bool) -> Iterator[Batch]:
        """Minibatches until fewer than `size` are left, which stay; with `everything`, these too."""
        order = torch.randperm(self._filled, generator=generator)
        end = len(order) if everything else len(order) // size * size
        for rows in order[:end].split(size):
            yield Batch(self._layer[rows].long(), self._inputs[rows].float(), self._probs[rows].float())
        rest = order[end:]
        left = self._layer[rest], self._inputs[rest], self._probs[rest]
        self._filled = 0
        self.add(*left)


def _unwritable(error: OSError) -> ProfileError:
    return ProfileError(
        f"The estimator's training data cannot be kept on disk: {error.strerror or error}. Make room there, lower "
        "estimator_tokens, or leave the estimator out."
    )
