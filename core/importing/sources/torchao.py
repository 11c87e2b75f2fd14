"""torchao: a weight `module.name` is stored as `module._name_qdata`, `_scale`, `_zero_point`; the files' headers say of
which of torchao's classes it is, and with which attributes. Experts may be stacked, in a first dimension of each.

Codes that a kernel's own order hides are not read. Scales of activations are not used.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from core.errors import ModelError
from core.hf.safetensors_file import TensorFiles
from core.importing.sources.decoded import INSTEAD, Matrices, QuantizedWeight, mismatch, rows, stored
from core.importing.sources.fp8 import Fp8Matrix
from core.importing.sources.integers import IntegerMatrix, Integers, fitting
from core.importing.sources.modelopt import ScaledInputs
from core.memory.codec.coded import QuantizedTensor
from core.system.reading import BadJson, parse_json

NOT_READ = {
    "Int4TilePackedTo4dTensor": "its codes are in the order in which the kernels of tinygemm read them.",
    "Int4PlainInt32Tensor": "its codes are in an order of Intel's or of Huawei's kernels.",
}
PARTS = ("qdata", "scale", "zero_point", "act_pre_scale", "act_quant_scale", "act_quant_zero_point")
PLAIN = "Tensor"  # the class of weights that are not quantized


class Int4Matrix(QuantizedWeight):
    """`qdata` int8 [out, in / 2], signed codes, the even one in the low half, `scale` and `zero_point` [in / group,
    out]: weight = code * scale + zero, as in our 4-bit formats."""

    def __init__(self, files: TensorFiles, name: str, data: dict[str, Any], expert: int | None) -> None:
        self._read = Part(files, name, expert)
        packed, scale, zero = (self._read.shape(part) for part in PARTS[:3])
        self.shape = (packed[0], 2 * packed[-1])
        self.scales = self.group = self.shape[1] // max(1, scale[0])
        if (
            len(packed) != 2
            or scale != zero
            or scale[1:] != packed[:1]
            or self.group * scale[0] != self.shape[1]
            or self._read.dtype("qdata").itemsize != 1
            or not all(self._read.dtype(part).is_floating_point for part in ("scale", "zero_point"))
            or _contradicted(data, self.group)
        ):
            raise mismatch(name, f"scales {scale} and zeros {zero} do not fit packed codes {packed}")

    def read(self, row: int | None) -> torch.Tensor:
        codes, scale, zero = self._parts()
        grouped = (codes.float() - 8).view(*scale.shape, -1)
        return rows(torch.addcmul(zero[..., None], grouped, scale.float()[..., None]).view(self.shape), row)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        ours = fitting(4, self.group)
        if ours is None:
            return None
        codes, *each = self._parts()
        scale, zero = (t.repeat_interleave(self.group // ours, 1) for t in each)
        return QuantizedTensor(f"int4-g{ours}", codes, scale, zero).each(lambda t: rows(t, row))

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = self._read("qdata").view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), -1).view(self.shape) ^ 8
        return codes, self._read("scale").t().contiguous(), self._read("zero_point").t().float().contiguous()

    @property
    def label(self) -> str:
        return f"INT4, groups of {self.group}"


class IntMatrix(IntegerMatrix):
    """`qdata` int8 [out, in] (of a bias [out]), signed codes of 8 bits, or of as many as `target_dtype` has, one to a
    byte, with a scale and perhaps a zero point for each group, row or tensor: weight = (code - zero) * scale."""

    symmetric = True

    def __init__(self, files: TensorFiles, name: str, data: dict[str, Any], expert: int | None) -> None:
        self._read = Part(files, name, expert)
        target = data.get("target_dtype")
        stated = str(target.get("_data") if isinstance(target, dict) else "int8").removeprefix("int")
        self.bits = int(stated) if stated in tuple("12345678") else 0
        self.shape, scale = self._read.shape("qdata"), self._read.shape("scale")
        zero = self._read.shape("zero_point") if f"{self._read.prefix}_zero_point" in files.tensors else scale
        self._matrix, self._grid = ((1, *shape) if len(self.shape) == 1 else shape for shape in (self.shape, scale))
        self._zero = f"{self._read.prefix}_zero_point" in files.tensors
        if (
            self.bits == 0
            or self._read.dtype("qdata") != torch.int8
            or not self._read.dtype("scale").is_floating_point
            or len(self._matrix) != 2
            or len(self._grid) != 2
            or self._grid[0] not in (1, self._matrix[0])
            or not self._grid[1]
            or self._matrix[1] % self._grid[1]
            or zero != scale
            or _contradicted(data, self._matrix[1] // self._grid[1])
        ):
            raise mismatch(name, f"scales {scale} and zeros {zero} do not fit codes {self.shape} of {stated:.9} bits")
        self.by_row, self.group = self._grid[1] == 1, self._matrix[1] // self._grid[1]
        self.scales = self._grid, self._zero

    def read(self, row: int | None) -> torch.Tensor:
        return rows(self.unpack().dequantize().view(self.shape), row)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        return super().coded(row) if len(self.shape) == 2 else None

    def unpack(self) -> Integers:
        middle = 1 << self.bits - 1
        codes = (self._read("qdata").to(torch.int16) + middle).to(torch.uint8).view(self._matrix)
        scale = self._read("scale").view(self._grid).expand(self._matrix[0], -1).contiguous()
        points = torch.full(scale.shape, middle, dtype=torch.int16)
        if self._zero:
            points += self._read("zero_point").to(torch.int16).view(self._grid)
        return Integers(self.bits, codes, scale, points, None)

    @property
    def label(self) -> str:
        return f"INT{self.bits}, " + ("one scale a row" if self.by_row else f"groups of {self.group}")


class Part:
    """Reads the stored parts of a weight, or of one of its stacked `expert`s."""

    def __init__(self, files: TensorFiles, name: str, expert: int | None) -> None:
        self._files, self._name, self._expert = files, name, expert
        self.prefix = prefix_of(name)

    def shape(self, part: str) -> tuple[int, ...]:
        """Raises ModelError when it is missing, or does not have the expert."""
        shape = stored(self._files, f"{self.prefix}_{part}", self._name)
        if self._expert is None:
            return shape
        if not shape or shape[0] <= self._expert:
            raise mismatch(self._name, f"its {part} {shape} lacks expert {self._expert}")
        return shape[1:]

    def dtype(self, part: str) -> torch.dtype:
        return self._files.tensors[f"{self.prefix}_{part}"].dtype

    def __call__(self, part: str) -> torch.Tensor:
        found = self._files.read(f"{self.prefix}_{part}", self._expert)
        return found if self._expert is None else found[0]


class Stack(QuantizedWeight):
    """Weights of one shape, each a row of a first dimension."""

    def __init__(self, of: Sequence[QuantizedWeight]) -> None:
        self._of, self.bits, self.shape, self.scales = of, of[0].bits, (len(of), *of[0].shape), of[0].layout

    def read(self, row: int | None) -> torch.Tensor:
        return torch.stack([one.read(None) for one in self._chosen(row)])

    def coded(self, row: int | None) -> QuantizedTensor | None:
        coded = [one.coded(None) for one in self._chosen(row)]
        whole = [one for one in coded if one is not None]
        if len({one.format for one in whole}) != 1 or len(whole) < len(coded):
            return None
        zeros = [one.zero for one in whole if one.zero is not None]
        codes, scales = (torch.stack([one[at] for one in whole]) for at in (1, 2))  # type: ignore[misc]
        return QuantizedTensor(whole[0].format, codes, scales, torch.stack(zeros) if zeros else None)

    def _chosen(self, row: int | None) -> Sequence[QuantizedWeight]:
        return self._of if row is None else self._of[row : row + 1]


READ: dict[str, Callable[[TensorFiles, str, dict[str, Any], int | None], Int4Matrix | IntMatrix]] = {
    "Int4Tensor": Int4Matrix,
    "Int8Tensor": IntMatrix,
    "IntxUnpackedToInt8Tensor": IntMatrix,
}
FLOATS = "Float8Tensor"


def _contradicted(data: dict[str, Any], group: int) -> bool:
    """Whether the attributes state groups of another size."""
    stated = data.get("block_size")
    return isinstance(stated, list) and stated[-1:] != [group]


def prefix_of(name: str) -> str:
    """What the names of a weight's parts begin with: `a.b.weight` -> `a.b._weight`."""
    module, dot, last = name.rpartition(".")
    return f"{module}{dot}_{last}"


def matrices(files: TensorFiles, dtype: torch.dtype) -> Matrices:
    """Raises ModelError for classes whose codes are not read, and where the headers do not say the class."""
    found: dict[str, QuantizedWeight] = {}
    labels: set[str] = set()
    integers: list[Int4Matrix | IntMatrix] = []
    for name, kind, data in _described(files.metadata()):
        codes, scale, factors = (f"{prefix_of(name)}_{part}" for part in ("qdata", "scale", "act_pre_scale"))
        shape = stored(files, codes, name)
        if 0 in shape:
            raise mismatch(name, f"its codes have the shape {shape}")
        if kind == FLOATS:
            stored(files, scale, name)
            found[name] = Fp8Matrix(files, codes, scale, None, dtype)
            labels.add("FP8")
        elif kind in READ:
            experts = range(shape[0]) if len(shape) == 3 else (None,)
            each = [READ[kind](files, name, data, expert) for expert in experts]
            found[name] = Stack(each) if len(shape) == 3 else each[0]
            integers += each
        else:
            why = NOT_READ.get(kind, f"of its classes {', '.join((*READ, FLOATS))} are read.")
            raise ModelError(f"This checkpoint stores {name!r} as torchao's {kind:.60}: {why} {INSTEAD}")
        if factors in files.tensors:
            found[name] = ScaledInputs(files, factors, found[name])
    taken = {f"{prefix_of(name)}_{part}" for name in found for part in PARTS}
    lost = next((name for name in files.tensors if name.endswith("_qdata") and name not in taken), None)
    if lost is not None:
        raise ModelError(
            f"The headers of this torchao checkpoint do not say what {lost!r} is: a tool that does not know torchao's "
            "files has written them again. Use the files as torchao or transformers wrote them, or the original model."
        )
    bytes_ = [one for one in integers if isinstance(one, IntMatrix) and one.bits == 8]
    by_row = all(one.by_row for one in bytes_)  # or a group is as wide as some of the weights
    for one in bytes_:
        one.by_row = by_row
    return found, list(taken), f"torchao {' and '.join(sorted(labels | {one.label for one in integers}))}"


def _described(headers: dict[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, class, attributes) of the weights that are not plain tensors."""
    for name, text in headers.items():
        try:
            said = parse_json(text)
        except BadJson:
            continue
        kind = said.get("_type", PLAIN) if isinstance(said, dict) else PLAIN
        if kind != PLAIN:
            data = said.get("_data")
            yield name, str(kind), data if isinstance(data, dict) else {}
