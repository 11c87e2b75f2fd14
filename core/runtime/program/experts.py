"""The experts of a layer in the fast arithmetic: products, activation and weighted sum as steps of native calls.

Rows of x are prepared once for all experts of a layer. The output of a row through an expert has the same bits whatever
else is computed with it, and so has its weighted sum, which is added in the router's order. An expert in several blocks
has the bits of a whole one: each block's hidden states are computed by themselves, and the second product reads all of
its slots in order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from core.errors import ModelError
from core.memory.codec import Codec
from core.memory.codec.base import Base
from core.memory.codec.fast.products import CanonicalProducts, numbered, serves
from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.matrix import Matrix, matrix
from core.memory.codec.native.team_code import LINE
from core.runtime.expert_math import ExpertMath
from core.runtime.program import bias, combine, gate
from core.runtime.program.activation import activation_of, bounds_of
from core.runtime.program.weights import drawn

if TYPE_CHECKING:
    from core.runtime.program.row_steps import RowSteps

ARGUMENTS = 8192, 384  # bytes for those of a row's steps, and for each of its experts
FP32 = torch.float32
Kernels = TypeVar("Kernels")


class ExpertKernels:
    """What the layers of a model share: the products of its experts' matrices, and the activation between them.
    `blocks`: slots of an expert, whose addresses follow one another."""

    def __init__(self, experts: Any, codec: Codec) -> None:
        """Raises ModelError, with the reason, where there are no kernels for such experts here."""
        up, down = matrices(codec, "gate_up_proj" if experts.has_gate else "up_proj")
        self.up, self.down = CanonicalProducts(up, FP32), CanonicalProducts(down, FP32)
        self.inner, self.hidden, self.blocks = down.inputs, down.outputs, down.blocks
        self.gate = gate_of(experts, down.own)
        self.wide = self.gate.inputs * self.blocks
        self._gate = gate.kernel(self.gate)
        self._biases = [None if one.bias is None else bias.kernel(_bias(one)) for one in (up, down)]
        self.steps = Steps()
        self.few: dict[tuple[int, int], RowSteps] = {}  # by rows, and the experts that each chooses

    def works(self, counts: Sequence[int], given: int, after: int, slots: int, memory: int) -> Iterable[Work]:
        """Compute counts[i] rows with the expert in its slots; all are addresses. `given` and `after`: the numbers of
        the first product for each slot, and of the second one for each expert, whose results are rows [all, wide]
        at `memory`, and [all, hidden]; the second one reads the rows at `prepared`."""
        pairs = sum(counts)
        acts, hidden = self._acts(memory, pairs), pairs * self.blocks
        yield from self._hidden(
            [count for count in counts for _ in range(self.blocks)], given, slots, memory, acts, hidden
        )
        yield from self._outputs(counts, after, slots, acts, self.prepared(memory, pairs))

    def part(self, first: int, count: int, given: int, after: int, slots: int, memory: int) -> Iterable[Work]:
        """The same for one row and `count` blocks of its expert from the `first` on, those before which were computed
        in this memory; its output once all of them were. `given`: numbers for each of these blocks, `after`: of the
        expert, `slots`: of all of its blocks until now."""
        own, acts = self.inner // self.blocks, self._acts(memory, 1)
        begin, into = memory + first * self.gate.inputs * 4, acts + first * own * 4
        yield from self._hidden([1] * count, given, slots + 8 * first, begin, into, count)
        if first + count == self.blocks:
            yield from self._outputs([1], after, slots, acts, self.prepared(memory, 1))

    def _hidden(self, counts: Sequence[int], given: int, slots: int, x: int, acts: int, rows: int) -> Iterable[Work]:
        """The first product of each slot -> `rows` at `x`, and their activations."""
        yield self.up.multiply_at(counts, given, slots, FP32)
        yield from self._added(0, counts, given, slots)
        units = rows * self.gate.units
        yield Work(self._gate, named(gate.FIELDS, x=x, out=acts), units, 1 if rows > 8 else units)

    def _outputs(self, counts: Sequence[int], after: int, slots: int, acts: int, prepared: int) -> Iterable[Work]:
        """The second product of each expert."""
        yield self.down.prepare(acts, self.inner * 4, sum(counts), prepared)
        yield self.down.multiply_at(counts, after, slots, FP32)
        yield from self._added(1, counts, after, slots)

    def _acts(self, memory: int, pairs: int) -> int:
        """Where the activations of so many rows are in the memory of `works`."""
        return memory + pairs * self.wide * 4

    def prepared(self, memory: int, pairs: int) -> int:
        """Where those are as the second product takes them."""
        begin = self._acts(memory, pairs) + pairs * self.inner * 4
        return begin + -begin % 64

    def numbers(
        self, x: int, rows: Iterable[int], counts: Sequence[int], outs: Iterable[int], memory: int
    ) -> tuple[list[int], list[int]]:
        """`given` and `after` of `works`: the prepared rows at `x` whose indices are at each of `rows`, and results one
        after the other at each of `outs`."""
        wide, long, prepared = self.wide * 4, self.hidden * 4, self.prepared(memory, sum(counts))
        given, after, done = list[int](), list[int](), 0
        for index, count, out in zip(rows, counts, outs, strict=True):
            for block in range(self.blocks):
                given += x, index, count, memory + done * wide + block * wide // self.blocks, wide
            after += prepared, numbered(done), count, out, long
            done += count
        return given, after

    def row(self, steps: Steps, chosen: int, x: int, slots: int, out: int, memory: int, room: int) -> Iterable[Work]:
        """Compute one row at `x` with the experts in so many slots -> rows [chosen, hidden] at `out`. The prepared row
        is at `memory`, and what is between the products at `room`."""
        yield self.up.prepare(x, 0, 1, memory)
        counts = [1] * chosen
        given, after = self.numbers(memory, [numbered(0)] * chosen, counts, self.outs(out, counts), room)
        yield from self.works(counts, steps.put(given), steps.put(after), slots, room)

    def outs(self, first: int, counts: Sequence[int]) -> list[int]:
        """Where the outputs of each of `counts` begin, one after the other from an address on."""
        return starts(first, counts, self.hidden * 4)

    def outputs_at(self, memory: int, rows: int = 1) -> int:
        """Where the outputs of so many rows may be in memory of `token_memory` bytes, aligned."""
        return memory + rows * self.up.prepared_bytes

    def room_at(self, memory: int, pairs: int, rows: int = 1) -> int:
        """Where their room is there, behind so many outputs."""
        room = self.outputs_at(memory, rows) + pairs * self.hidden * 4
        return room + -room % LINE

    def begun(self, numbers: int) -> tuple[Steps, int]:
        """No steps yet of a row with so many experts, and where as many numbers are that change."""
        steps = Steps(8, ARGUMENTS[0] + ARGUMENTS[1] * numbers)
        return steps, steps.put([0] * numbers)

    def token(
        self, steps: Steps, chosen: int, x: int, weights: int, slots: int, total: int, memory: int
    ) -> Iterable[Work]:
        """Compute one row at `x` with the experts in so many slots, and their sum by `weights` -> one row at `total`.
        All are addresses; `memory`: of `token_memory` bytes, aligned."""
        out = self.outputs_at(memory)
        yield from self.row(steps, chosen, x, slots, out, memory, self.room_at(memory, chosen))
        at = {"experts": out, "pairs": numbered(0), "weights": weights, "out": total}
        yield Work(combine.kernel(combine.Combine(self.hidden, chosen)), named(combine.FIELDS, **at), 1, 1)

    def token_memory(self, pairs: int, rows: int = 1) -> int:
        """Bytes that `token` needs, or so many rows."""
        return self.memory(pairs) + rows * self.up.prepared_bytes + pairs * self.hidden * 4 + LINE

    def part_at(self, room: int, pairs: int, number: int) -> int:
        """Where the memory of `part` for an expert of a row is, behind the room of so many pairs."""
        each = -(-self.memory(1) // LINE) * LINE
        room += self.memory(pairs)
        return room + -room % LINE + number * each

    def parts_memory(self, pairs: int) -> int:
        """Bytes that `part` needs for as many experts at once, beside those of `token_memory`."""
        return self.part_at(0, 0, pairs) + LINE if self.blocks > 1 else 0

    def _added(self, product: int, counts: Sequence[int], given: int, slots: int) -> Iterator[Work]:
        """Add the experts' biases to the first or second product, where they have any."""
        if (kernel := self._biases[product]) is not None:
            yield Work(kernel, named(bias.FIELDS, given=given, slots=slots), len(counts), 1)

    def memory(self, pairs: int) -> int:
        """Bytes that `works` needs for as many rows."""
        return pairs * ((self.wide + self.inner) * 4 + self.down.prepared_bytes) + 64


class FastMath(ExpertMath):
    """The arithmetic of one layer's experts; `ExpertMath` is the reference."""

    def __init__(self, experts: Any, codec: Codec, kernels: ExpertKernels) -> None:
        self.kernels = kernels
        super().__init__(experts, codec)
        self.steps = kernels.steps

    def needs_places(self) -> bool:
        return False


def starts(first: int, counts: Sequence[int], size: int) -> list[int]:
    """Where each of `counts` begins, whose elements of `size` bytes follow each other from an address on."""
    return [first + size * done for done in accumulate(counts, initial=0)][:-1]


def matrices(codec: Codec, up: str) -> tuple[Matrix, Matrix]:
    """The two matrices of an expert, the second one as all of its blocks' slots have it. Raises ModelError where there
    are no kernels for them here."""
    assert isinstance(codec, Base) and codec.device.type == "cpu"
    first, second = matrix(codec, up), matrix(codec, "down_proj")
    second = second._replace(inputs=second.inputs * codec.blocks, blocks=codec.blocks)
    biases = sum(one.bias is not None for one in (first, second))
    if not (serves(first) and serves(second)) or biases != len(codec.biases):
        raise ModelError("the fast arithmetic has no kernels for experts of this form")
    return first, second


def _bias(of: Matrix) -> bias.Bias:
    """The bias of a matrix, in its first slot."""
    assert of.bias is not None
    return bias.Bias(of.outputs, of.bias.dtype, of.bias.at, of.blocks)


def gate_of(experts: Any, inner: int) -> gate.Gate:
    """The activation of an experts module between products of `inner` neurons. Raises ModelError."""
    x = drawn(FP32, 4, inner * (2 if experts.has_gate else 1))
    found = activation_of(experts, experts._apply_gate if experts.has_gate else experts.act_fn, x, inner)
    if found is None:
        raise ModelError("the fast arithmetic has no such activation")
    return found


def for_each(
    modules: Sequence[Any], codecs: Iterable[Codec], make: Callable[[Any, Codec], Kernels]
) -> Iterator[Kernels]:
    """What `make` makes of each layer's experts, once for those of one codec and the same bounds."""
    made: dict[tuple[Codec, float, float], Kernels] = {}
    for module, codec in zip(modules, codecs, strict=True):
        key = codec, *bounds_of(module)
        if key not in made:
            made[key] = make(module, codec)
        yield made[key]
