"""What a launch through the CUDA driver costs in Python: `python -m bench.launch_cost [CALLS]`. Needs no GPU.

The driver's library is one whose cuLaunchKernel does nothing, so that all that is measured is ours: arguments taken
apart, the function found, parameters written, the call through C. Beside it stands the same product with Triton's own
launch up to its C, which is left out: what it takes at least. Prints microseconds, medians of rounds that take turns.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from core.memory.codec import PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.kernels.driver import DriverLauncher
from core.memory.codec.kernels.products import SlotKernels
from core.memory.cuda_driver import FUNCTIONS, CudaDriver

ROUNDS, TOP_K, HIDDEN, WIDTH = 15, 8, 2048, 768
FORMATS = ("int4-g64", "checkpoint")


def idle_driver() -> CudaDriver:
    """Every function succeeds. A launch is a function of C that returns its first argument: the kernel's handle, 0."""
    made = {name: _succeeding(len(types)) for name, types in FUNCTIONS.items()}
    standard = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    made["cuLaunchKernel"] = ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS["cuLaunchKernel"])(("abs", standard))
    return CudaDriver(SimpleNamespace(**made))


def _succeeding(arguments: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * arguments)(lambda *_: 0)


def triton_without_c() -> None:
    """For the rest of this process, Triton has a GPU, and its launcher does everything but what it does in C."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        load_binary=lambda *_: (1, 1, 0, 0, 1024),
        unload_module=lambda module: None,
    )
    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 89, 32),
        launcher_cls=lambda source, metadata: lambda *_: None,
        utils=utils,
    )
    type(driver).active = property(lambda self: gpu)


def medians_us(calls: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Of each call, over rounds of so many."""
    spans: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(ROUNDS):
        for what, call in calls.items():
            began_s = time.perf_counter()
            for _ in range(times):
                call()
            spans[what].append(time.perf_counter() - began_s)
    return {what: 1e6 * statistics.median(some) / times for what, some in spans.items()}


class _Noting:
    """Notes what would be launched."""

    def __init__(self, taken: list[Any]) -> None:
        self._taken = taken

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._taken.append((programs, arguments))


def measured(name: str, times: int) -> dict[str, float]:
    """Microseconds of a decoded token's product with 8 experts, of the launch in it, of the call through C in that, and
    of the product with Triton's launch but for its C."""
    specs = {
        "gate_up_proj": PartSpec((2 * WIDTH, HIDDEN), torch.bfloat16),
        "down_proj": PartSpec((HIDDEN, WIDTH), torch.bfloat16),
    }
    codec = make_codec(name, specs=specs, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert isinstance(codec, Base)
    launcher = DriverLauncher(idle_driver(), 0, 89, lambda index: 0)
    kernels = SlotKernels(codec, launcher)
    slots = [torch.zeros(codec.slot_bytes, dtype=torch.uint8) for _ in range(TOP_K)]
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    taken: list[Any] = []
    noting = SlotKernels(codec, lambda kernel, constants: _Noting(taken))
    noting.multiply("gate_up_proj", slots, x)
    ((programs, arguments),) = taken
    by_triton = SlotKernels(codec)
    for one in (kernels, by_triton):
        one.multiply("gate_up_proj", slots, x)  # compiles
    start = kernels._launch("gate_up_proj", TOP_K).start
    (function,) = launcher._functions.values()
    room = function.room()[1]
    return medians_us(
        {
            "product": lambda: kernels.multiply("gate_up_proj", slots, x),
            "launch": lambda: start[programs](*arguments),
            "call": lambda: launcher.start(function, programs, room),
            "product by Triton": lambda: by_triton.multiply("gate_up_proj", slots, x),
        },
        times,
    )


def main(times: int = 2000) -> None:
    """Print a line for each format."""
    torch.set_num_threads(1)
    triton_without_c()
    for name in FORMATS:
        found = measured(name, times)
        print(f"{name:<12}" + "".join(f"  {what} {us:5.1f} us" for what, us in found.items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
