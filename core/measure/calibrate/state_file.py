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

    `inputs` makes the network's inputs [n, H], of a 16-bit float dtype, of records [n]. Memory: twice POOL_BYTES, one
    block, and what `inputs` takes for a block, while minibatches are read; else nothing."""

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
        left: list[Batch] = []  # fewer than `size`
        for at in range(0, len(order), pooled):
            blocks = map(self._read, order[at : at + pooled].tolist())
            pool = Batch(*map(torch.cat, zip(*left, *blocks, strict=True)))
            mixed = torch.randperm(len(pool.layer), generator=generator)
            end = len(mixed) if at + pooled >= len(order) else len(mixed) // size * size
            for rows in mixed[:end].split(size):
                yield Batch(pool.layer[rows], pool.inputs[rows].float(), pool.probs[rows].float())
            left = [Batch(*(values[mixed[end:]] for values in pool))]

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

    def _read(self, block: int) -> Batch:
        self._file.seek(block * self._block * self._layout.itemsize)
        number = min(self._block, self.count - block * self._block)
        records = np.frombuffer(self._file.read(number * self._layout.itemsize), self._layout)
        layer = torch.from_numpy(records["layer"].astype(np.int64))
        return Batch(layer, self._inputs(records), torch.from_numpy(records["probs"].copy()))


def _unwritable(error: OSError) -> ProfileError:
    return ProfileError(
        f"The estimator's training data cannot be kept on disk: {error.strerror or error}. Make room there, lower "
        "estimator_tokens, or leave the estimator out."
    )
