"""A CUDA driver without a GPU, called through C as the real one is. What is launched is noted, and may be run.

It refuses what the real one refuses: images and names that it does not know, calls of a thread without a context,
programs of another size than the kernel was compiled for, and shared memory that was not asked for.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from core.memory.codec.kernels.build import Binary
from core.memory.codec.kernels.driver import SHARED_BYTES
from core.memory.cuda_driver import FUNCTIONS, CudaDriver

INVALID, MEMORY, IMAGE, CONTEXT, NOT_FOUND, UNKNOWN = 1, 2, 200, 201, 500, 999
WORDS = {
    INVALID: b"invalid argument",
    MEMORY: b"out of memory",
    IMAGE: b"device kernel image is invalid",
    CONTEXT: b"invalid device context",
    NOT_FOUND: b"named symbol not found",
}
PRIMARY = 0xC0FFEE << 16  # handle of torch's context
TAG = 8  # bytes that an image begins with


@dataclass
class Image:
    """A kernel that `cuModuleLoadData` knows, by the bytes that its image begins with."""

    name: str
    sizes: Sequence[int]  # bytes of its parameters
    threads: int
    about: Any = None
    shared: int = SHARED_BYTES  # bytes that a launch may have


class Launch(NamedTuple):
    image: Image
    programs: tuple[int, int, int]
    shared: int
    stream: int
    parameters: list[int]  # unsigned


@dataclass
class FakeDriver:
    """`faults`: functions that fail, and with which error. `lacks`: functions that the library has not."""

    run: Callable[[Launch], object] = lambda launch: None
    arrived: Callable[[], object] = lambda: None  # before a launch's parameters are read
    faults: dict[str, int] = field(default_factory=dict)
    lacks: set[str] = field(default_factory=set)
    launches: list[Launch] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    raised: BaseException | None = None  # by `run`

    def __post_init__(self) -> None:
        self._images: dict[bytes, Image] = {}
        self._handles: dict[int, Image] = {}
        self._threads = threading.local()

    def driver(self) -> CudaDriver:
        return CudaDriver(self.library())

    def library(self) -> Any:
        """What ctypes.CDLL gives for a driver's library."""
        made = {name: self._function(name, types) for name, types in FUNCTIONS.items() if name not in self.lacks}
        return SimpleNamespace(**made)

    def known(self, made: Binary, sizes: Sequence[int], about: Any = None) -> Binary:
        """The same kernel with an image that can be loaded."""
        tag = (len(self._images) + 1).to_bytes(TAG, "big")
        self._images[tag] = Image(made.name, sizes, made.threads, about)
        return made._replace(image=tag + made.image)

    def _function(self, name: str, types: Sequence[Any]) -> Any:
        body = getattr(self, f"_{name}", lambda *_: 0)

        def call(*given: Any) -> int:
            self.calls[name] += 1
            if name in self.faults:
                return self.faults[name]
            try:
                return int(body(*given))
            except BaseException as error:  # ctypes would print it and go on
                self.raised = error
                return UNKNOWN

        plain = [ctypes.c_void_p if issubclass(one, (ctypes._Pointer, ctypes.c_char_p)) else one for one in types]
        return ctypes.CFUNCTYPE(ctypes.c_int, *plain)(call)

    def _cuGetErrorString(self, error: int, to: int) -> int:
        ctypes.c_char_p.from_address(to).value = WORDS.get(error)
        return 0 if error in WORDS else INVALID

    def _cuDeviceGet(self, to: int, index: int) -> int:
        ctypes.c_int.from_address(to).value = index + 40
        return 0

    def _cuDevicePrimaryCtxRetain(self, to: int, device: int) -> int:
        return self._give(to, PRIMARY + device)

    def _cuCtxGetCurrent(self, to: int) -> int:
        return self._give(to, getattr(self._threads, "context", None))

    def _cuCtxSetCurrent(self, context: int) -> int:
        self._threads.context = context
        return 0

    def _cuMemHostGetDevicePointer_v2(self, to: int, pointer: int, flags: int) -> int:
        return self._give(to, pointer + (1 << 40)) if flags == 0 else INVALID

    def _cuModuleLoadData(self, to: int, image: int) -> int:
        if not hasattr(self._threads, "context"):
            return CONTEXT
        found = self._images.get(ctypes.string_at(image, TAG))
        return IMAGE if found is None else self._give(to, self._handle(found))

    def _cuModuleGetFunction(self, to: int, module: int, name: int) -> int:
        image = self._handles[module]
        return self._give(to, self._handle(image)) if ctypes.string_at(name) == image.name.encode() else NOT_FOUND

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:
        if attribute != 8 or value > 99 << 10:  # the most that a program of an RTX 40 can have
            return INVALID
        self._handles[function].shared = value
        return 0

    def _cuLaunchKernel(self, function: int, *given: Any) -> int:
        across, down, deep, threads, *one, shared, stream, parameters, extra = given
        if not hasattr(self._threads, "context"):
            return CONTEXT
        image = self._handles[function]
        if threads != image.threads or one != [1, 1] or shared > image.shared or extra or not across * down * deep:
            return INVALID
        self.arrived()
        at = (ctypes.c_void_p * len(image.sizes)).from_address(parameters)
        values = [
            int.from_bytes(ctypes.string_at(start or 0, size), "little")
            for start, size in zip(at, image.sizes, strict=True)
        ]
        launch = Launch(image, (across, down, deep), shared, stream or 0, values)
        self.launches.append(launch)
        self.run(launch)
        return 0

    def _handle(self, image: Image) -> int:
        handle = 1 << 40 | len(self._handles)  # of more than 32 bits, as the real ones
        self._handles[handle] = image
        return handle

    def _give(self, to: int, value: int | None) -> int:
        ctypes.c_void_p.from_address(to).value = value
        return 0
