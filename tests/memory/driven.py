"""`python -m tests.memory.interpret driven`: cases of the kernels, launched through a CUDA driver that has no GPU
and runs them under Triton's interpreter.

A launch is compiled for a GPU, packed, and called through C. The driver takes the parameters apart by what the
compiled code itself says of them: their sizes in its PTX, their names and types in its Triton IR, where also stands
which of them the compiler was told to be multiples of 16. The interpreter then runs the kernel at the very addresses
that arrived.

They are compiled in a process of their own, as in this one they are interpreted.
"""

import ctypes
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from core.memory.codec.base import Base
from core.memory.codec.kernels import driver as launching
from core.memory.codec.kernels.build import Binary, Kinds
from core.memory.codec.kernels.driver import DriverLauncher
from core.memory.codec.kernels.products import LANES, LANES_MOST, SlotKernels
from tests import kernel_cases as cases
from tests.fake_driver import FakeDriver, Launch
from tests.memory.compiling import CAPABILITY, compile_here, compiling

CPU = torch.device("cpu")
NUMBERS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64}
ARGUMENT = re.compile(r"%[\w.]+: (?:!tt\.ptr<(\w+)>|(\w+))( \{tt\.divisibility = 16 : i32\})? loc\(\"(\w+)")
ENTRY = re.compile(r"\.param \.[ubsf](\d+)( \.ptr \.global)?")


class Parameter(NamedTuple):
    name: str
    points_at: str  # number type; "" = a number itself
    number: str
    is_multiple: bool  # of 16


class Compiled(NamedTuple):
    """`taken` = what the code takes; a kernel and its constants, to be interpreted."""

    taken: list[Parameter]
    kernel: Any
    constants: Mapping[str, Any]


def parameters_of(name: str, ptx: str, ttir: str) -> tuple[list[int], list[Parameter]]:
    """Bytes of each parameter, and what it is, where Triton did not append it."""
    entry = ptx[ptx.index(f".entry {name}(") :].partition(")")[0]
    sizes = [(int(bits) // 8, bool(points)) for bits, points in ENTRY.findall(entry)]
    head = next(line for line in ttir.splitlines() if f"tt.func public @{name}(" in line)
    taken = [Parameter(found[3], found[0], found[1], bool(found[2])) for found in ARGUMENT.findall(head)]
    assert len(taken) == head.count("%") and entry.count(".param") == len(sizes)
    assert sizes[len(taken) :] == [(8, True)] * 2  # Triton's own scratch
    for one, (size, points) in zip(taken, sizes, strict=False):
        assert points == bool(one.points_at) and size == {"": 8, "i32": 4, "i64": 8}[one.number], (one, size)
    return [size for size, _ in sizes], taken


class Driven:
    """A launcher whose launches are run here."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self.fake = FakeDriver(run=self._run)
        self.launcher = DriverLauncher(self.fake.driver(), 0, CAPABILITY, lambda index: 0, self._build)
        self.not_multiples = 0  # arguments that are not multiples of 16, and are not said to be

    def kernels(self, codec: Base) -> SlotKernels:
        return SlotKernels(codec, self._starter)

    def _starter(self, kernel: Any, constants: Mapping[str, Any]) -> Any:
        start = self.launcher(kernel, constants)

        class Checked:
            def __getitem__(_, programs: tuple[int, ...]) -> Any:
                def call(*arguments: object) -> None:
                    try:
                        start[programs](*arguments)
                    finally:
                        if self.fake.raised is not None:
                            raise self.fake.raised
                    launch = self.fake.launches.pop()
                    assert launch.programs[: len(programs)] == programs

                return call

        return Checked()

    def _build(self, kernel: Any, constants: Mapping[str, Any], kinds: Kinds, capability: int) -> Binary:
        assert capability == CAPABILITY
        made, ptx, ttir = self._pool.submit(compile_here, kernel.__name__, dict(constants), kinds).result()
        sizes, taken = parameters_of(made.name, ptx, ttir)
        assert f".reqntid {made.threads}\n" in ptx.replace(", 1, 1", "")
        return self.fake.known(made, sizes, Compiled(taken, kernel, constants))

    def _run(self, launch: Launch) -> None:
        taken, kernel, constants = launch.image.about
        given: dict[str, list[Any]] = {}
        for one, value in zip(taken, launch.parameters, strict=False):
            assert not one.is_multiple or value % 16 == 0, f"{one.name} = {value} was said to be a multiple of 16"
            self.not_multiples += value % 16 != 0
            given.setdefault(one.name, []).append(_argument(one, value))
        assert launch.parameters[len(taken) :] == [0, 0]
        several = {"bases"} if constants["LANES"] else set()
        found = {name: tuple(some) if name in several else some[0] for name, some in given.items()}
        nothing = dict.fromkeys(name for name in kernel.arg_names if name not in found and name not in constants)
        kernel[launch.programs](**found, **nothing, **constants)


def _argument(one: Parameter, value: int) -> Any:
    if one.points_at:
        dtype = NUMBERS[one.points_at]
        return torch.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(value), dtype=dtype)
    bits = int(one.number[1:])
    return value - (value >> (bits - 1) << bits)


def errors() -> dict[str, float]:
    """Of every format: both lengths of launches, by addresses and by ids, with biases and without, dequantized."""
    found: dict[str, float] = {}
    for i, name in enumerate(cases.FORMATS):
        dtype = list(cases.BOUNDS)[i % 3]
        for transposed in (False, True):
            long = cases.odd_inputs(name, long=transposed)
            for count in (LANES - 1, LANES_MOST + 1):
                bias = transposed ^ bool(i % 2)
                found[f"{name} transposed={transposed} {count}"] = cases.product_error(
                    name, dtype, CPU, transposed, bias, 5, long, count
                )
            found[f"{name} transposed={transposed} by ids"] = by_ids_error(name, dtype, transposed)
        if name in cases.CODED:
            found[f"{name} dequantized"] = cases.dequantization_error(name, dtype, CPU, transposed=bool(i % 2))
    return found


def by_ids_error(name: str, dtype: torch.dtype, transposed: bool) -> float:
    """0 where experts that the device finds have the bits of those whose addresses are told, 2 where not."""
    experts = cases.matrices(4, 7, cases.odd_inputs(name, long=False), transposed, bias=True)
    codec = cases.codec_of(name, experts[0], dtype, CPU, transposed)
    slots, kernels = cases.slots_of(codec, experts), cases.kernels_of(codec)
    table, ids = torch.tensor([slot.raw.data_ptr() for slot in slots]), torch.tensor([3, 0, 2])
    x = torch.randn(3, codec.out_in("down_proj")[1], generator=torch.Generator().manual_seed(4)).to(dtype)
    told = kernels.multiply("down_proj", [slots[e].raw for e in ids.tolist()], x)
    return 2.0 * (not kernels.multiply_by_ids("down_proj", table, ids, x).equal(told))


def planted() -> dict[str, float | str]:
    """What becomes of a launch in which two arguments changed places, and of one whose numbers are all said to be
    multiples of 16: its error, or what was raised."""
    kinds, launch = launching.kinds_of, launching.DriverLaunch._launch

    def swapped(self: Any, programs: tuple[int, ...], *arguments: Any) -> None:
        *others, bias_at, stride = arguments
        launch(self, programs, *others, stride, bias_at)

    def multiples(given: Any) -> Kinds:
        return tuple(kind if kind is None or isinstance(kind[0], tuple) else (kind[0], True) for kind in kinds(given))

    found: dict[str, float | str] = {}
    faults = {
        "swapped": patch.object(launching.DriverLaunch, "_launch", swapped),
        "multiples": patch.object(launching, "kinds_of", multiples),
    }
    for name, fault in faults.items():
        with fault:
            try:
                found[name] = cases.product_error("checkpoint", torch.float16, CPU, True, False)
            except AssertionError as error:
                found[name] = str(error)
    return found


def found(which: str) -> dict[str, object]:
    """{"errors": of every case, "not_multiples": how often a number is not said to be one of 16,
    "planted": what became of two faults}."""
    with compiling() as pool:
        driven = Driven(pool)
        with patch.object(cases, "kernels_of", driven.kernels):
            return {"errors": errors(), "not_multiples": driven.not_multiples, "planted": planted()}
