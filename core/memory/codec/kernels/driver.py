"""Launches kernels through the CUDA driver, where Triton cannot: its launcher is C that it compiles when first used.

    build.py        the machine code, by Triton's compiler without its launcher
    DriverLauncher  loads machine code into the device, one function for every kind of arguments
    DriverLaunch    one kernel with its constants, launched by what SlotKernels passes

A launch writes its parameters to memory that is kept for them, and makes one call. It waits for nothing and allocates
nothing on the device, so that CUDA graphs can capture it; only the first one of a kind compiles and loads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from core.memory.codec.kernels.build import Binary, Kinds, build, kinds_of
from core.memory.cuda_driver import CudaDriver, open_driver

SHARED_BYTES = 48 << 10  # more must be requested
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Build = Callable[[Any, Mapping[str, Any], Kinds, int], Binary]
Room = tuple[Any, Any]  # memory for the parameters of a launch, and where each lies


class Function:
    """A kernel on the device. `rooms` are free; a launch takes one, as several threads may launch."""

    def __init__(self, handle: int, made: Binary) -> None:
        self.handle, self.threads, self.shared = handle, made.threads, made.shared
        self.layout, self.rooms = struct.Struct(f"@{made.parameters}"), list[Room]()
        codes = made.parameters + "Q" * made.scratch  # scratch stays zero
        self._ends = [struct.calcsize(f"@{codes[:count]}") for count in range(1, len(codes) + 1)]
        self._sizes = [struct.calcsize(code) for code in codes]

    def room(self) -> Room:
        """One that is free, or a new one."""
        try:
            return self.rooms.pop()
        except IndexError:
            memory = (ctypes.c_uint64 * -(-self._ends[-1] // 8))()
            first = ctypes.addressof(memory)
            starts = [first + end - size for end, size in zip(self._ends, self._sizes, strict=True)]
            return memory, (ctypes.c_void_p * len(starts))(*starts)


class DriverLaunch:
    """One kernel with its constants: `self[programs](*arguments)` launches it on the device's current stream."""

    def __init__(self, launcher: DriverLauncher, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._launcher, self._kernel, self._constants = launcher, kernel, dict(constants)
        self._functions: dict[tuple[Any, ...], Function] = {}

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, programs)

    def _launch(self, programs: tuple[int, ...], *arguments: Any) -> None:
        """Raises DriverError, and what the compiler raises when it is needed."""
        key: list[Any] = []
        values: list[int] = []
        for one in arguments:
            if type(one) is int:
                values.append(one)
            elif type(one) is tuple:
                values += one
            elif one is not None:
                key.append(one.dtype)
                values.append(one.data_ptr())
        key += [value & 15 for value in values]
        known = tuple(key)
        function = self._functions.get(known) or self._function(known, arguments)
        room = function.room()
        try:
            function.layout.pack_into(room[0], 0, *values)
        except struct.error:  # an integer of more than 32 bits
            function = self._function((*known, kinds_of(arguments)), arguments)
            room = function.room()
            function.layout.pack_into(room[0], 0, *values)
        if 0 not in programs:
            self._launcher.start(function, programs, room[1])
        function.rooms.append(room)

    def _function(self, known: tuple[Any, ...], arguments: tuple[Any, ...]) -> Function:
        found = self._functions.get(known)
        if found is None:
            found = self._launcher.function(self._kernel, self._constants, kinds_of(arguments))
            self._functions[known] = found
        return found


class DriverLauncher:
    """Kernels of one device, launched through its driver: a `Launcher` of core.memory.codec.kernels.products.

    Functions stay on the device as long as the process runs, as Triton's own do. May be used by several threads.
    """

    def __init__(
        self, driver: CudaDriver, index: int, capability: int, stream: Callable[[int], int], build: Build = build
    ) -> None:
        """`index` = the device's, `capability` = 10 * major + minor, `stream(index)` = the handle of the stream that
        launches go to. Raises DriverError."""
        self._driver, self._index, self._capability, self._stream = driver, index, capability, stream
        self._build, self._thread, self._lock = build, threading.local(), threading.Lock()
        self._functions: dict[Any, Function] = {}
        self._start = driver.function("cuLaunchKernel")
        driver.call("cuInit", 0)
        device = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(device), index)
        self._context = driver.handle("cuDevicePrimaryCtxRetain", device.value)  # torch's; retained for good, as there

    def __call__(self, kernel: Any, constants: Mapping[str, Any]) -> DriverLaunch:
        return DriverLaunch(self, kernel, constants)

    def start(self, function: Function, programs: tuple[int, ...], parameters: Any) -> None:
        """Launch a function; `parameters` are read before this returns. Raises DriverError."""
        if not hasattr(self._thread, "ready"):
            self._make_ready()
        across, down, deep = programs if len(programs) == 3 else (*programs, 1)
        stream, threads = self._stream(self._index), function.threads
        error = self._start(
            function.handle, across, down, deep, threads, 1, 1, function.shared, stream, parameters, None
        )
        if error:
            raise self._driver.error("cuLaunchKernel", error)

    def function(self, kernel: Any, constants: Mapping[str, Any], kinds: Kinds) -> Function:
        """The kernel for arguments of these kinds, compiled and loaded the first time. Not within a graph's capture,
        which a load would end. Raises DriverError, and what the compiler raises."""
        key = kernel, tuple(constants.items()), kinds
        with self._lock:
            found = self._functions.get(key)
            if found is None:
                made = self._build(kernel, constants, kinds, self._capability)
                self._make_ready()
                found = self._functions[key] = Function(self._loaded(made), made)
            return found

    def _loaded(self, made: Binary) -> int:
        module = self._driver.handle("cuModuleLoadData", made.image)
        handle = self._driver.handle("cuModuleGetFunction", module, made.name.encode())
        if made.shared > SHARED_BYTES:
            self._driver.call("cuFuncSetAttribute", handle, MAX_SHARED, made.shared)
        return handle

    def _make_ready(self) -> None:
        """torch's context becomes this thread's, where it has none yet: where only torch's caches have served it."""
        if not self._driver.handle("cuCtxGetCurrent"):
            self._driver.call("cuCtxSetCurrent", self._context)
        self._thread.ready = True


@functools.cache
def driver_launcher(device: torch.device) -> DriverLauncher:
    """That of a GPU which torch uses. Raises DriverError."""
    driver = open_driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    major, minor = torch.cuda.get_device_capability(index)
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of current_stream's time; Triton's way, too
    stream = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)
    return DriverLauncher(driver, index, 10 * major + minor, stream)
