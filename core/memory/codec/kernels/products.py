"""Launches the kernels: field offsets of a codec's slots, grouping of slots into launches, dequantisation scratch."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from core.memory.codec.base import Base, Codec
from core.memory.codec.bits import PLANES
from core.memory.codec.grouped import Grouped
from core.memory.codec.kernels import blocks
from core.memory.codec.matrix import Matrix, Part, matrix
from core.memory.codec.plain import Plain
from core.memory.codec.tables import table

LANES, LANES_MOST = 8, 16  # slots per launch: the top-k of most models, and for more
BY_IDS = 0  # in their place: as many as there are ids on the device
SCRATCH_BYTES = 64 << 20  # dequantised weights at a time, or one matrix where that is larger
INPUTS = {2: 8, 3: 8, 4: 8, 5: 8, 6: 8, 8: 4}  # per word of codes, by bits; 8 bits: 1 where rows are not whole words


def per_word(one: Matrix) -> int:
    """Codes that are read as one word; 0 = plain numbers."""
    if not one.bits:
        return 0
    return INPUTS[one.bits] if one.inputs % INPUTS[one.bits] == 0 else 1


def fields(one: Matrix) -> tuple[int, ...]:
    """Byte offsets in a slot of codes, bits above them, scales, zeros, and the scales of rows or of `wide` inputs; 0
    where absent."""
    return tuple(0 if part is None else part.at for part in (one.codes, one.high, one.scale, one.zero, one.row))


def portable(codec: Codec) -> Codec:
    """A codec for the same slots that computes on the CPU by the reference: for trials and tests."""
    assert isinstance(codec, Base)
    kind: type[Plain] | type[Grouped] = Plain if codec.is_plain else Grouped
    return kind(codec.formats, codec.specs, codec.dtype, torch.device("cpu"), codec.is_transposed, codec.numbers)


def scratch_bytes(codec: Codec) -> int:
    """Peak device memory of dequantised weights, for a prompt; must be counted in the budget."""
    if codec.is_plain or not isinstance(codec, Base):
        return 0
    sizes = [out * inputs * codec.dtype.itemsize for out, inputs in map(codec.out_in, codec.weights)]
    return min(max(SCRATCH_BYTES, *sizes), LANES_MOST * max(sizes))


def launches(slots: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yields (first slot, slots, addresses) per launch; addresses are padded by repetition to one of two lengths, so
    that at most two variants of a kernel are ever compiled."""
    lanes = LANES if len(slots) <= LANES else LANES_MOST
    for first in range(0, len(slots), lanes):
        bases = slots[first : first + lanes]
        yield first, len(bases), (*bases, *[bases[-1]] * (lanes - len(bases)))


class Starter(Protocol):
    """A kernel with its compile-time constants."""

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., object]:
        """What launches so many programs on the current stream when it is called with the kernel's arguments."""


Launcher = Callable[[Any, Mapping[str, Any]], Starter]  # of a kernel and its constants


class ByTriton:
    """Launched by Triton itself, or interpreted by it."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., object]:
        return functools.partial(self._kernel[programs], **self._constants)


class Launch(NamedTuple):
    """A kernel with its constants, and its programs per slot."""

    start: Starter
    programs: tuple[int, int]


class SlotKernels:
    """Products of one codec's matrices, read directly from slots. Everything runs on the current CUDA stream.

    Fast for decode; for many states of one expert, `dequantized` weights with torch's products are faster.
    """

    def __init__(self, codec: Base, launcher: Launcher = ByTriton) -> None:
        """Raises ImportError."""
        import triton.language as tl

        from core.memory.codec.kernels import dequantize, gemv

        self._gemv, self._dequantize, self.dtype = gemv, dequantize.dequantize, codec.dtype
        self._launcher, self._launches = launcher, dict[tuple[str, int, bool], Launch]()
        self.is_plain = codec.is_plain
        self._matrices = {part: matrix(codec, part) for part in codec.weights}
        tables = {part: form.table for part, form in codec.formats.items() if form.table}
        self._tables = {part: table(name, codec.device) for part, name in tables.items()}
        self._number: dict[torch.dtype, Any] = {
            torch.float32: tl.float32,
            torch.float16: tl.float16,
            torch.bfloat16: tl.bfloat16,
            torch.uint8: tl.uint8,
            torch.int8: tl.int8,
            torch.float8_e4m3fn: tl.float8e4nv,
        }
        self._word = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}

    def outputs(self, part: str) -> int:
        """Rows (out features) of a matrix [out, in]."""
        return self._matrices[part].outputs

    def inputs(self, part: str) -> int:
        """Columns (in features) of a matrix [out, in]."""
        return self._matrices[part].inputs

    def multiply(self, part: str, slots: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Multiply one state by the matrix of each slot, plus bias: x [slots, in], or [1, in] shared -> [slots, out].

        `slots` are byte tensors on x's device; x has the codec's dtype. Sums are fp32, rounded once.
        """
        one, x = self._matrices[part], x.contiguous()
        bias_at = one.bias.at if one.bias is not None else 0
        out = x.new_empty(len(slots), one.outputs)
        stride = 0 if x.shape[0] == 1 else one.inputs
        for first, count, bases in launches([slot.data_ptr() for slot in slots]):
            start, (across, _) = self._launch(part, len(bases))
            given = (self._tables.get(part), bases, None, *fields(one)) if one.bits else (bases, None, one.codes.at)
            states, results = (x[first:] if stride else x, out[first:]) if first else (x, out)
            start[across, count](states, results, *given, bias_at, stride)
        return out

    def multiply_by_ids(self, part: str, table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As `multiply`, with the bits that it has, where only the device knows which experts: the matrix of each
        expert of `ids` [k] int64, whose bytes are at its address in `table` [experts] int64, in a slot or in pinned
        memory that the device can read; x [k, in], or [1, in] shared -> [k, out]. One launch, and nothing of it depends
        on numbers that the host would have to wait for."""
        one, x = self._matrices[part], x.contiguous()
        bias_at = one.bias.at if one.bias is not None else 0
        out = x.new_empty(len(ids), one.outputs)
        start, (across, _) = self._launch(part, BY_IDS)
        given = (self._tables.get(part), table, ids, *fields(one)) if one.bits else (table, ids, one.codes.at)
        start[across, len(ids)](x, out, *given, bias_at, 0 if x.shape[0] == 1 else one.inputs)
        return out

    def dequantized(self, part: str, slots: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Dequantised weights of coded slots in the codec's dtype, some slots at a time: (first slot, [some, out, in]).

        Each overwrites the previous one; together they take at most `scratch_bytes`.
        """
        one = self._matrices[part]
        fit = SCRATCH_BYTES // (one.outputs * one.inputs * self.dtype.itemsize)
        step = min(max(1, fit), LANES_MOST, len(slots))
        scratch = torch.empty(step, one.outputs, one.inputs, dtype=self.dtype, device=slots[0].device)
        for start in range(0, len(slots), step):
            for first, count, bases in launches([slot.data_ptr() for slot in slots[start : start + step]]):
                launch, (across, down) = self._launch(part, len(bases), dequantize=True)
                launch[across, count, down](scratch[first:], self._tables.get(part), bases, *fields(one))
            yield start, scratch[: len(slots) - start]

    def _launch(self, part: str, lanes: int, dequantize: bool = False) -> Launch:
        """The launch that multiplies by a part of up to `lanes` slots, or BY_IDS, or dequantises it."""
        key = part, lanes, dequantize
        if key not in self._launches:
            kernel, programs, constants = (self._dequantization if dequantize else self._product)(part, lanes)
            self._launches[key] = Launch(self._launcher(kernel, constants), programs)
        return self._launches[key]

    def _product(self, part: str, lanes: int) -> tuple[Any, tuple[int, int], dict[str, Any]]:
        """Kernel, programs per slot, and constants."""
        one, bias = self._matrices[part], self._matrices[part].bias is not None
        if one.bits:
            block = blocks.coded(one.bits, one.inputs // per_word(one))
            constants = {"BIAS": bias, **self._coded(one, lanes, block)}
            return self._gemv.coded_rows, (-(-one.outputs // block.outputs), 1), constants
        block = (blocks.columns if one.transposed else blocks.plain)(self.dtype.itemsize, one.inputs)
        constants = {
            "LANES": lanes,
            "N": one.outputs,
            "K": one.inputs,
            "BIAS": bias,
            "BN": block.outputs,
            "BK": block.across,
            "num_warps": block.warps,
            "enable_fp_fusion": True,
        }
        kernel = self._gemv.plain_columns if one.transposed else self._gemv.plain_rows
        return kernel, (-(-one.outputs // block.outputs), 1), constants

    def _dequantization(self, part: str, lanes: int) -> tuple[Any, tuple[int, int], dict[str, Any]]:
        one = self._matrices[part]
        words = one.inputs // per_word(one)
        block = blocks.dequantize(words)
        programs = -(-one.outputs // block.outputs), -(-words // block.across)
        return self._dequantize, programs, self._coded(one, lanes, block)

    def _coded(self, one: Matrix, lanes: int, block: blocks.Tile) -> dict[str, Any]:
        """Compile-time constants of the kernels for codes."""
        return {
            "LANES": lanes,
            "N": one.outputs,
            "K": one.inputs,
            "G": one.group,
            "BITS": one.bits,
            "TABLE": bool(one.table),
            "SCALE": self._type(one.scale),
            "ZERO": self._type(one.zero),
            "ROW": one.row is not None and not one.wide,
            "WIDE": one.wide,
            "OFFSET": 128 if one.bits == 8 else one.offset,  # bytes are read with their sign turned
            "STEP": PLANES[one.bits][0],
            "WORD": self._word[PLANES[one.bits][0] * per_word(one) // 8],
            "ABOVE": self._word[max(1, sum(PLANES[one.bits][1:]) * per_word(one) // 8)],
            "V": per_word(one),
            "BN": block.outputs,
            "BU": block.across,
            "num_warps": block.warps,
            "enable_fp_fusion": True,
        }

    def _type(self, part: Part | None) -> Any:
        return None if part is None else self._number[part.dtype]
