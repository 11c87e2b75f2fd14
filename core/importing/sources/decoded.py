"""Presents a quantized checkpoint as plain tensors: each quantized matrix is listed under its weight's name."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.hf.tensors import Shape, TensorShape
from core.memory.codec.coded import QuantizedTensor
from core.system.wording import reason

UNFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""What numbers that contradict each other end in, somewhere in the code of a format: shapes, sizes, indices."""

INSTEAD = "Use the original model, which can be rounded here when it is imported, or a GGUF version of it."
"""What to take in place of a checkpoint that is not read."""


class QuantizedWeight(ABC):
    """One quantized weight: `shape` is the dequantised shape. Reads its tensors from `files` on demand."""

    shape: tuple[int, ...]
    bits: int = 4  # of a code
    scales: object = ()  # how they lie, where that is not the same for all weights of the class and shape

    @property
    def layout(self) -> object:
        """Equal for weights that are stored alike."""
        return type(self), self.bits, self.shape, self.scales

    @abstractmethod
    def read(self, row: int | None) -> torch.Tensor:
        """The weight, or `row` of its first dimension as [1, ...], computed in fp32 as its format defines it."""

    @abstractmethod
    def coded(self, row: int | None) -> QuantizedTensor | None:
        """The same as codes; None when none of our formats holds them exactly."""


Matrices = tuple[dict[str, QuantizedWeight], list[str], str]
"""Quantized weights by name, the stored tensors that they consist of, and a label."""


class Decoded:
    """The `Tensors` of a quantized checkpoint."""

    def __init__(
        self, files: TensorFiles, matrices: Mapping[str, QuantizedWeight], parts: Iterable[str], dtype: torch.dtype
    ) -> None:
        """`matrices` by weight name, `parts` the stored tensors they consist of, `dtype` the number type of their dense
        copies."""
        taken = set(parts)
        self._files, self.matrices = files, dict(matrices)
        plain: dict[str, Shape] = {name: at for name, at in files.tensors.items() if name not in taken}
        self.tensors: Mapping[str, Shape] = plain | {n: TensorShape(dtype, m.shape) for n, m in self.matrices.items()}

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """See `Tensors.read`: plain tensors as stored, quantized ones dequantised."""
        matrix = self.matrices.get(name)
        if matrix is None:
            return self._files.read(name, row)
        try:
            return matrix.read(row)
        except UNFIT as error:
            raise mismatch(name, f"its codes cannot be read ({reason(error)})") from error

    def coded(self, name: str, row: int | None = None) -> QuantizedTensor | None:
        """See `Tensors.coded`."""
        matrix = self.matrices.get(name)
        try:
            return None if matrix is None else matrix.coded(row)
        except UNFIT as error:
            raise mismatch(name, f"its codes cannot be read ({reason(error)})") from error

    def close(self) -> None:
        self._files.close()


def rows(tensor: torch.Tensor, row: int | None) -> torch.Tensor:
    """A tensor, or one row of its first dimension as [1, ...]."""
    return tensor if row is None else tensor[row : row + 1]


def stored(files: TensorFiles, name: str, of: str) -> tuple[int, ...]:
    """The shape of a tensor that the quantized weight `of` needs. Raises ModelError when it is missing."""
    if name not in files.tensors:
        raise ModelError(
            f"The quantized weight {of!r} lacks {name.rpartition('.')[2]!r}. The checkpoint is "
            "incomplete: download it again."
        )
    return files.tensors[name].shape


def mismatch(of: str, why: str) -> ModelError:
    """The error for a weight whose stored tensors are inconsistent."""
    return ModelError(
        f"The quantized weight {of!r} is stored in a way that Moestro does not know: {why}. Use another "
        "version of the model."
    )


def scaled(files: TensorFiles) -> Iterator[tuple[str, str, Shape]]:
    """(name, prefix, how it is stored) of each `weight` that has a `weight_scale`."""
    for name, at in files.tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "weight" and f"{name}_scale" in files.tensors:
            yield name, prefix, at
