"""What a launch through the CUDA driver costs in Python: `python -m bench.launch_cost`. Needs no GPU.

The driver's library is one whose cuLaunchKernel does nothing, so that all that is measured is ours: arguments taken
apart, the function found, parameters written, the call through C. Prints microseconds, the median of rounds.
"""

from __future__ import annotations

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

ROUNDS, CALLS, TOP_K, HIDDEN, WIDTH = 15, 2000, 8, 2048, 768
FORMATS = ("int4-g64", "checkpoint")


def idle_driver() -> CudaDriver:
    """Every function succeeds. A launch is a function of C that returns its first argument: the kernel's handle, 0."""
    made = {name: _succeeding(len(types)) for name, types in FUNCTIONS.items()}
    standard = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    made["cuLaunchKernel"] = ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS["cuLaunchKernel"])(("abs", standard))
    return CudaDriver(SimpleNamespace(**made))


def _succeeding(arguments: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * arguments)(lambda *_: 0)


def median_us(call: Callable[[], object]) -> float:
    """Of a call, over rounds of many."""
    spans = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        spans.append((time.perf_counter() - began_s) / CALLS)
    return 1e6 * statistics.median(spans)


class _Noting:
    """Notes what would be launched."""

    def __init__(self, taken: list[Any]) -> None:
        self._taken = taken

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._taken.append((programs, arguments))


def measured(name: str) -> dict[str, float]:
    """Microseconds of a product's launch alone, of the call through C in it, and of the whole product."""
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
    kernels.multiply("gate_up_proj", slots, x)  # compiles
    start = kernels._launch("gate_up_proj", TOP_K).start
    (function,) = launcher._functions.values()
    room = function.room()[1]
    return {
        "product_us": median_us(lambda: kernels.multiply("gate_up_proj", slots, x)),
        "launch_us": median_us(lambda: start[programs](*arguments)),
        "call_us": median_us(lambda: launcher.start(function, programs, room)),
    }


def main() -> None:
    """Print a line for each format."""
    torch.set_num_threads(1)
    for name in FORMATS:
        found = measured(name)
        print(f"{name:<12}" + "".join(f"  {what} {us:5.1f}" for what, us in found.items()))


if __name__ == "__main__":
    main()
