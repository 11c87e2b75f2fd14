"""Launches through the CUDA driver, on one that has no GPU: what reaches it, and what it refuses, in words."""

import ctypes
import itertools
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from core.errors import DeviceError
from core.memory import cuda_driver, mapped
from core.memory.codec.kernels import build as building
from core.memory.codec.kernels.build import CODES, Binary, Kinds, kinds_of, parameter_bits
from core.memory.codec.kernels.driver import DriverLauncher
from core.memory.cuda_driver import CudaDriver, DriverError, open_driver
from core.runtime.out_of_memory import shortage
from tests.fake_driver import IMAGE, INVALID, MEMORY, PRIMARY, FakeDriver

STREAM = 0x7F00_1234_5678
WIDTHS = {"i": 4, "q": 8, "Q": 8}


class Kernels:
    """A launcher of kernels that are no code, and the driver beneath it."""

    def __init__(self, shared: int = 0, scratch: int = 2, **faults: int) -> None:
        self.fake, self.built = FakeDriver(faults=faults), list[Kinds]()
        self.shared, self.scratch = shared, scratch
        self.launcher = DriverLauncher(self.fake.driver(), 3, 89, lambda index: STREAM + index, self.build)

    def build(self, kernel: Any, constants: Mapping[str, Any], kinds: Kinds, capability: int) -> Binary:
        assert capability == 89
        self.built.append(kinds)
        flat = [one for kind in kinds if kind for one in (kind if isinstance(kind[0], tuple) else (kind,))]
        codes = "".join(CODES.get(str(name), "Q") for name, _ in flat)
        made = Binary(kernel, b"code", codes, self.scratch, 64, self.shared)
        return self.fake.known(made, [*(WIDTHS[code] for code in codes), *[8] * self.scratch])

    def launch(self, *arguments: object, programs: tuple[int, ...] = (5, 7)) -> None:
        self.launcher("kernel", {"N": 3})[programs](*arguments)


def test_parameters_arrive_as_the_kernel_reads_them() -> None:
    """Pointers, addresses and integers in order, nothing for None, zeros for what Triton appends."""
    kernels, x = Kernels(shared=1000), torch.zeros(4, dtype=torch.bfloat16)
    kernels.launch(x, None, (1 << 46, 48), 17, -1, 96, programs=(2, 3, 4))
    (launch,) = kernels.fake.launches
    assert launch.parameters == [x.data_ptr(), 1 << 46, 48, 17, (1 << 32) - 1, 96, 0, 0]
    assert launch.programs == (2, 3, 4) and launch.shared == 1000 and launch.stream == STREAM + 3
    kernels.launch(x, None, (1 << 45, 64), 33, -1, 80)
    assert kernels.fake.launches[1].parameters[1:6] == [1 << 45, 64, 33, (1 << 32) - 1, 80]
    assert kernels.fake.launches[1].programs == (5, 7, 1)


def test_one_function_for_each_kind_of_arguments() -> None:
    """Compiled and loaded once for all launches, and all objects, whose arguments are alike."""
    kernels, x = Kernels(), torch.zeros(64, dtype=torch.float16)
    first, second = (kernels.launcher("kernel", {"N": 3}) for _ in range(2))
    for launch in (first, second):
        for at in (0, 8, 16):
            launch[1, 1](x[at:], 32 + at * 2, (64,))
    assert len(kernels.built) == kernels.fake.calls["cuModuleLoadData"] == 1
    assert kernels.built == [(("*fp16", True), ("i32", True), (("i64", True),))]
    for arguments, kind in {
        (x[1:], 32, (64,)): (("*fp16", False), ("i32", True), (("i64", True),)),
        (x, 45, (64,)): (("*fp16", True), ("i32", False), (("i64", True),)),
        (x, 1, (64,)): (("*fp16", True), ("i32", False), (("i64", True),)),
        (x, 32, (72,)): (("*fp16", True), ("i32", True), (("i64", False),)),
        (x.float(), 32, (64,)): (("*fp32", True), ("i32", True), (("i64", True),)),
        (x, 1 << 31, (64,)): (("*fp16", True), ("i64", True), (("i64", True),)),
    }.items():
        first[1, 1](*arguments)
        assert kernels.built[-1] == kind == kinds_of(arguments)
    assert len(kernels.built) == 6
    kernels.launcher("kernel", {"N": 4})[1, 1](x, 32, (64,))
    assert len(kernels.built) == 7  # another kernel


def test_integers_of_more_than_32_bits() -> None:
    kernels, x = Kernels(), torch.zeros(4)
    launch = kernels.launcher("kernel", {})
    for value in (16, 1 << 40, 16, 1 << 40, -16):
        launch[1, 1](x, value, 5)
    assert [one.parameters[1:3] for one in kernels.fake.launches[:4]] == [[16, 5], [1 << 40, 5]] * 2
    assert len(kernels.built) == 2
    wide, pairs = 1 << 36, kernels.launcher("kernel", {"N": 1})
    for one, other in ((wide, 16), (16, wide), (wide, wide), (16, 16)):  # none of which fits what came before
        pairs[1, 1](x, one, other)
        assert kernels.fake.launches[-1].parameters[1:3] == [one, other]


def test_more_shared_memory_is_asked_for() -> None:
    kernels = Kernels(shared=60 << 10)
    kernels.launch(16)
    assert kernels.fake.launches[0].shared == 60 << 10
    with pytest.raises(DriverError, match=r"CUDA error: invalid argument \(cuFuncSetAttribute: 1\)"):
        Kernels(shared=200 << 10).launch(16)


def test_no_programs_are_no_launch() -> None:
    kernels = Kernels()
    kernels.launch(16, programs=(0, 4))
    assert not kernels.fake.launches


def test_a_thread_that_has_no_context_gets_torch_s() -> None:
    """Once; one that has a context keeps it."""
    kernels = Kernels()
    kernels.launch(16)
    assert kernels.fake._threads.context == PRIMARY + 43
    thread = threading.Thread(target=lambda: [kernels.launch(16) for _ in range(3)])
    thread.start()
    thread.join()
    assert len(kernels.fake.launches) == 4 and kernels.fake.calls["cuCtxSetCurrent"] == 2
    other = Kernels()
    other.fake._threads.context = 77
    other.launch(16)
    assert other.fake._threads.context == 77 and other.fake.calls["cuCtxSetCurrent"] == 0


def test_threads_do_not_share_parameters() -> None:
    """Each launch's parameters stay its own until the driver has read them, however many threads launch."""
    kernels, meeting, order = Kernels(), threading.Barrier(4), itertools.count()
    launch, seen = kernels.launcher("kernel", {}), list[int]()
    launch[1, 1](0, 0)

    def arrived() -> None:
        if next(order) < 4:
            meeting.wait()  # all four have written theirs, and none has been read

    kernels.fake.arrived, kernels.fake.run = arrived, lambda one: seen.append(one.parameters[0] ^ one.parameters[1])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: [launch[1, 1](*[16 * at + 256 * i] * 2) for i in range(50)], range(4)))
    assert kernels.fake.raised is None and seen == [0] * 200
    assert len({one.parameters[0] for one in kernels.fake.launches}) == 200
    assert len(kernels.built) == 1


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("cuModuleLoadData", MEMORY, "CUDA error: out of memory (cuModuleLoadData: 2)"),
        ("cuModuleLoadData", IMAGE, "CUDA error: device kernel image is invalid (cuModuleLoadData: 200)"),
        ("cuLaunchKernel", MEMORY, "CUDA error: out of memory (cuLaunchKernel: 2)"),
        ("cuLaunchKernel", 12345, "CUDA error: unknown error (cuLaunchKernel: 12345)"),
        ("cuCtxGetCurrent", INVALID, "CUDA error: invalid argument (cuCtxGetCurrent: 1)"),
    ],
)
def test_errors_come_in_the_driver_s_words(function: str, error: int, said: str) -> None:
    kernels = Kernels(**{function: error})
    with pytest.raises(DriverError) as raised:
        kernels.launch(16)
    assert str(raised.value) == said
    assert bool(shortage(raised.value)) == (error == MEMORY)  # what frees slots and asks again
    kernels.fake.faults.clear()
    kernels.launch(32)
    assert kernels.fake.launches[-1].parameters[0] == 32


def test_what_the_driver_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverError, match="NVIDIA's driver has no cuLaunchKernel"):
        DriverLauncher(FakeDriver(lacks={"cuLaunchKernel"}).driver(), 0, 80, lambda index: 0)
    with pytest.raises(DriverError, match=r"invalid argument \(cuDevicePrimaryCtxRetain: 1\)"):
        DriverLauncher(FakeDriver(faults={"cuDevicePrimaryCtxRetain": 1}).driver(), 0, 80, lambda index: 0)

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    open_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match=r"cannot be opened \((libcuda.so.1|nvcuda.dll): cannot open"):
        open_driver()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(DriverError, match="built for AMD"):
        open_driver()


def test_the_library_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name))
    for system in ("posix", "nt"):
        open_driver.cache_clear()
        monkeypatch.setattr(cuda_driver.os, "name", system)
        assert isinstance(open_driver(), CudaDriver)
    monkeypatch.undo()
    open_driver.cache_clear()
    assert opened == ["libcuda.so.1", "nvcuda.dll"]


class Made:
    """In the place of Triton's compiled kernel: `_kernel` with an address, an integer and two pointers of Triton's."""

    def __init__(self, parameters: str = ".u64 .ptr .global .align 1 a, .u32 b, .u64 c, .u64 d", **other: int) -> None:
        values = {"name": "_kernel", "num_warps": 4, "shared": 512, "num_ctas": 1}
        values |= {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": 0, **other}
        self.metadata = _metadata(values)
        text = ",\n".join(f"\t.param {one.strip()}" for one in parameters.split(","))
        self.asm = {"ptx": f".visible .entry _kernel(\n{text}\n)\n.reqntid 128\n{{", "cubin": b"\x7fELF"}


def _metadata(values: dict[str, Any]) -> Any:
    from collections import namedtuple

    return namedtuple("KernelMetadata", sorted(values))(**values)  # type: ignore[call-arg]


KINDS: Kinds = (("*fp32", True), ("i32", False))


def test_what_a_launch_needs_is_read_off_the_machine_code() -> None:
    assert building.binary_of(Made(), KINDS) == Binary("_kernel", b"\x7fELF", "Qi", 2, 128, 512)
    older = Made(".u64 a, .u32 b, .u64 c")
    older.metadata = _metadata({k: v for k, v in older.metadata._asdict().items() if k != "profile_scratch_size"})
    assert building.binary_of(older, KINDS).scratch == 1
    assert parameter_bits(".entry k(.param .align 64 .b8 k_0[128],\n.param .s16 k_1)", "k") == [0, 16]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Made(global_scratch_size=64), "needs global_scratch_size"),
        (Made(profile_scratch_size=8, launch_pdl=1), "needs launch_pdl, profile_scratch_size"),
        (Made(num_ctas=2), "needs num_ctas"),
        (Made(".u64 a, .u32 b"), r"takes parameters of \[64, 32\] bits, and \[64, 32\] are known"),
        (Made(".u64 a, .u32 b, .u64 c, .u64 d, .u64 e"), "takes parameters"),
        (Made(".u64 a, .u64 b, .u64 c, .u64 d"), "takes parameters"),
        (Made(".u32 a, .u64 b, .u64 c, .u64 d"), "takes parameters"),
        (Made(".u64 a, .u32 b, .u64 c, .align 64 .b8 d[128]"), "takes parameters"),
    ],
)
def test_what_is_not_known_is_refused(made: Made, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        building.binary_of(made, KINDS)


def test_parameters_are_laid_out_as_in_c() -> None:
    """Each at a multiple of its size, however they alternate."""
    kernels = Kernels(scratch=1)
    kernels.launch(1, (2,), 3, 4, torch.zeros(1, dtype=torch.int64), 5)
    (launch,) = kernels.fake.launches
    assert launch.parameters[:4] == [1, 2, 3, 4] and launch.parameters[5:] == [5, 0]
    assert struct.calcsize("@iqiiQiQ") == 48


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    open_driver.cache_clear()


def test_the_driver_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    row, driver = torch.zeros(64, dtype=torch.uint8), FakeDriver().driver()
    monkeypatch.setattr(mapped, "open_driver", lambda: driver)
    assert mapped.device_address(row) == row.data_ptr() + (1 << 40)


def test_what_it_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(faults={"cuMemHostGetDevicePointer_v2": INVALID}).driver()
    monkeypatch.setattr(mapped, "open_driver", lambda: driver)
    with pytest.raises(DeviceError, match=r"no address of pinned memory \(CUDA error: invalid argument"):
        mapped.device_address(torch.zeros(1))


def test_without_its_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="cannot be opened"):
        mapped.device_address(torch.zeros(1))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(DeviceError, match="AMD"):
        mapped.device_address(torch.zeros(1))
