"""States as whole numbers, to the last one that is not finite; and kernels that call nobody."""

import functools
import math
import re
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec.grouped import Grouped
from core.memory.codec.matrix import matrix
from core.memory.codec.native.products import Kernels
from core.memory.codec.native.states import BLOCK, LINE, CodeRun, CodeRunOffsets, Plane, StateLayout, code_runs, prepare
from core.memory.codec.native.team_code import functions
from core.system.native import compile
from core.system.native.compile import compiled, widths
from tests.kernel_cases import FEW
from tests.memory.test_codec import make, portable
from tests.memory.test_native import case, states
from tests.selection import examples, layered

pytestmark = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")
KINDS = ("int8", "int4-g32", "nf4", "mxfp4", "int3", "int2")
PLANES = {
    "bytes": (Plane(8, 0, 1, 0),),
    "halves": (Plane(4, 8, 1, 0),),
    "three": (Plane(2, 4, 1, 0), Plane(1, 0, 4, 0)),
}
INPUTS = (96, 576)
DTYPES = (torch.bfloat16, torch.float16)


class Prepared:
    """A state [inputs] in its layout, as the numbers it holds."""

    def __init__(self, x: torch.Tensor, planes: tuple[Plane, ...], width: int) -> None:
        self.layout, self._prepare = _preparing(x.numel(), planes, width, x.dtype)
        self._raw = torch.zeros(self.layout.bytes + LINE, dtype=torch.uint8)
        self._prepare(x.data_ptr(), self._raw.data_ptr())
        assert not self._raw[self.layout.bytes :].any()  # nothing is written past its end

    def _read(self, at: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self._raw[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _whole(self, p: int, run: CodeRun, place: CodeRunOffsets) -> torch.Tensor:
        return self._read(place.numbers, torch.int16, run.turns, self.layout.planes[p].per_word, run.words)

    def _places(self, p: int) -> list[tuple[tuple[int, CodeRun], CodeRunOffsets]]:
        return [(key, place) for key, place in self.layout.places.items() if key[0] == p]

    def numbers(self, p: int) -> tuple[torch.Tensor, torch.Tensor]:
        """In the order of the inputs: what the numbers are, and what each of them counts, fp64."""
        found = []
        for (_, run), place in self._places(p):
            real = run.bytes // 2
            whole = self._whole(p, run, place).double().transpose(1, 2)
            steps = self._read(place.steps, torch.float32, run.turns, run.lanes).double()
            assert not whole[:, real:].any() and not steps[:, real // 2 :].any()
            steps = steps.repeat_interleave(2, 1)[..., None].expand_as(whole)
            found.append(torch.stack([whole[:, :real], steps[:, :real]]).flatten(1))
        whole, steps = torch.cat(found, 1)
        return whole, steps

    def offsets(self, p: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each piece: what its sums begin with, and the sums of the numbers that they take in."""
        return [
            (
                self._read(place.offsets, torch.int32, run.turns, run.lanes),
                self._whole(p, run, place).int().unflatten(2, (-1, 2)).sum((1, 3)),
            )
            for (_, run), place in self._places(p)
        ]

    @property
    def sums(self) -> torch.Tensor:
        return self._read(self.layout.sums, torch.float32, self.layout.inputs // self.layout.group)


@functools.cache
def _preparing(inputs: int, planes: tuple[Plane, ...], width: int, dtype: torch.dtype) -> tuple[StateLayout, Any]:
    layout = StateLayout(inputs, 32, planes, width)
    return layout, compiled(prepare("prepare", layout, dtype), width=width)["prepare"]


@st.composite
def given_states(draw: st.DrawFn) -> torch.Tensor:
    """Any bits at all, the finite ones; or numbers of like size, some of them zero."""
    inputs, dtype = draw(st.sampled_from(INPUTS)), draw(st.sampled_from(DTYPES))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    if draw(st.booleans()):
        x = torch.randint(-(1 << 15), 1 << 15, (inputs,), generator=rng, dtype=torch.int16).view(dtype)
        return torch.where(x.isfinite(), x, 0)
    size = draw(st.sampled_from([0.0, 1e-40, 1e-7, 1.0, 3e3]))
    kept = torch.rand(inputs, generator=rng) < draw(st.sampled_from([0.05, 1.0]))
    return (torch.randn(inputs, generator=rng) * size * kept).to(dtype)


@examples(60)
@given(x=given_states(), planes=st.sampled_from(sorted(PLANES)), width=st.sampled_from(widths() or (0,)))
def test_a_state_is_kept_to_a_15th_bit_of_its_largest_number(x: torch.Tensor, planes: str, width: int) -> None:
    made, exact = Prepared(x, PLANES[planes], width), x.double()
    largest = exact.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    for p, plane in enumerate(PLANES[planes]):
        whole, steps = made.numbers(p)
        kept, tiny = whole * steps, 2.0**-126  # the smallest step
        assert bool(((kept - exact).abs() <= (largest * 2.0**-15).clamp(min=tiny / 2)).all())
        if x.dtype == torch.bfloat16:
            assert torch.equal(
                *(torch.where((exact.abs() >= largest / 64) & (largest >= 2.0**-112), v, 0) for v in (kept, exact))
            )
        assert bool((whole.abs() <= 1 << 15).all())
        for offsets, sums in made.offsets(p):
            assert torch.equal(offsets, -plane.offset * sums)
    assert torch.equal(made.sums, kept.view(-1, BLOCK).sum(1).float())


@examples(100)
@given(blocks=st.integers(1, 200), bits=st.sampled_from([1, 2, 4, 8]), width=st.sampled_from([32, 64]))
def test_pieces_cover_every_input_once_and_in_order(blocks: int, bits: int, width: int) -> None:
    cut: list[CodeRun] = list(code_runs(blocks * BLOCK, Plane(bits, 0, 1, 0), width))
    end = 0
    for run in cut:
        assert run.start == end and run.turns > 0
        assert run.codes % BLOCK == 0 and run.bytes * 8 == run.codes * bits
        assert run.bytes <= 2 * run.words <= width
        assert run.lanes >= run.codes // BLOCK  # no sum takes in numbers of two steps
        end += run.turns * run.codes
    assert end == blocks * BLOCK
    assert [p.bytes for p in cut] == sorted({p.bytes for p in cut}, reverse=True)
    assert all(run.turns == 1 for run in cut[1:])


@pytest.mark.parametrize("name", layered(KINDS, quick=lambda name: name in FEW or name == "nf4"))
@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_what_is_not_finite_spoils_its_own_state_alone(name: str, odd: float) -> None:
    made = case(name, 2, 192, torch.bfloat16, 0)
    x = states(4, 192, torch.bfloat16)
    clean = made.products.many(made.at[0], x)
    for place in (0, 77, 191):
        x[2, place] = odd
        got = made.products.many(made.at[0], x)
        assert not got[2].isfinite().any()
        assert not made.products.few(made.at[:1], x[2:3]).isfinite().any()
        x[2] = 0.0  # nothing of it is left in the layout
        assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])
        assert not made.products.many(made.at[0], x)[2].any()


@pytest.mark.parametrize("name", KINDS)
def test_sums_of_the_largest_numbers_do_not_overflow(name: str) -> None:
    made = case(name, 2, 192, torch.float16, 0, powers=True)
    tensors = made.slots[0].weights["down_proj"]
    for plane in tensors[: 2 if name == "int3" else 1]:
        plane.view(torch.uint8).copy_(torch.tensor([[{"int8": 0x80, "mxfp4": 0x77}.get(name, 0)], [0xFF]]))
    for sign in (1, -1):
        x = torch.full((4, 192), sign * (1 - 2.0**-11)).half()
        want = x.double() @ portable(made.codec, torch.float32).weight(tensors).double().t()
        torch.testing.assert_close(made.products.many(made.at[0], x).double(), want, rtol=2.0**-10, atol=0.0)


class Read(Exception):
    """LLVM was given instructions."""


def instructions(name: str, inputs: int, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a matrix's kernels, or of what shares them between threads."""
    codec = make(name, {"down_proj": torch.empty(2, inputs or 32)}, torch.float32)
    assert isinstance(codec, Grouped)

    def read(text: str) -> None:
        raise Read(text)

    with monkeypatch.context() as patched:
        patched.setattr(compile._llvm(), "parse_assembly", read)
        with pytest.raises(Read) as given:
            Kernels(matrix(codec, "down_proj"), torch.float16, width) if inputs else functions.__wrapped__()
    return str(given.value)


def wanted(file: bytes) -> set[str]:
    """The symbols that an ELF file for a 64-bit machine expects from elsewhere."""
    start, size, count = *struct.unpack_from("<Q", file, 40), *struct.unpack_from("<HH", file, 58)
    sections = [struct.unpack_from("<IIQQQQII", file, start + size * i) for i in range(count)]
    symbols = next(section for section in sections if section[1] == 2)
    names = sections[symbols[6]][4]
    found = [struct.unpack_from("<IBBH", file, symbols[4] + at) for at in range(24, symbols[5], 24)]
    return {file[names + name :].split(b"\0", 1)[0].decode() for name, _, _, defined in found if not defined}


@pytest.mark.parametrize(
    ("name", "inputs"),
    layered(
        [("int8", 192), ("nf4", 192), ("mxfp4", 192), ("int3", 192), ("int8", 0), ("int3", 2880)],
        quick=lambda case: case == ("int8", 0),
    ),
)
def test_kernels_need_nothing_of_any_library(name: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for conversions, and on Windows not to grow the stack either. 0 inputs = the functions of teams."""
    llvm = compile._llvm()
    for width, cpu in compile.CPUS.items():
        module = llvm.parse_assembly(instructions(name, inputs, width, monkeypatch))
        for system in ("x86_64-unknown-linux-gnu", "x86_64-pc-windows-msvc-elf"):
            machine = llvm.Target.from_triple(system).create_target_machine(cpu=cpu, opt=3, jit=True)
            module.triple, module.data_layout = system, str(machine.target_data)
            assert wanted(machine.emit_object(module)) == set(), system
            calls = re.findall(r"^\s+(?:call|jmp)q?\s+([^.\s]\S*)", machine.emit_assembly(module), re.MULTILINE)
            assert bool(calls) == (inputs == 0)  # of kernels, by their address
