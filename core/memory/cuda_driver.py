"""NVIDIA's driver, called directly, for what torch has no function for.

torch has loaded it before, and made the context that everything works in. An error has the driver's text, which
begins as that of torch's errors does: one check recognises errors of the device from both.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

HANDLE, HANDLES = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
FUNCTIONS: dict[str, tuple[Any, ...]] = {  # argument types; each returns a CUresult
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (HANDLES, ctypes.c_int),
    "cuCtxGetCurrent": (HANDLES,),
    "cuCtxSetCurrent": (HANDLE,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(ctypes.c_uint64), HANDLE, ctypes.c_uint),
    "cuModuleLoadData": (HANDLES, ctypes.c_char_p),
    "cuModuleGetFunction": (HANDLES, HANDLE, ctypes.c_char_p),
    "cuFuncSetAttribute": (HANDLE, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernel": (HANDLE, *[ctypes.c_uint] * 7, HANDLE, HANDLE, HANDLE),
}


class DriverError(RuntimeError):
    """The driver refused a call, or is not there."""


class CudaDriver:
    """The functions of the driver's library that FUNCTIONS lists. Source: CUDA driver API, since CUDA 4."""

    def __init__(self, library: Any) -> None:
        """`library` has the functions as attributes, as a ctypes.CDLL."""
        self._library = library
        self._functions: dict[str, Callable[..., int]] = {}

    def function(self, name: str) -> Callable[..., int]:
        """One function, which returns an error's number or 0. Raises DriverError where the driver lacks it."""
        if name not in self._functions:
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise DriverError(f"NVIDIA's driver has no {name}: it is too old, or damaged") from None
            function.argtypes, function.restype = FUNCTIONS[name], ctypes.c_int
            self._functions[name] = function
        return self._functions[name]

    def call(self, name: str, *arguments: object) -> None:
        """Call a function. Raises DriverError, in the driver's words."""
        if error := self.function(name)(*arguments):
            raise self.error(name, error)

    def handle(self, name: str, *arguments: object) -> int:
        """Call a function that writes a handle to its first argument -> that, 0 for none. Raises DriverError."""
        found = HANDLE()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value or 0

    def error(self, name: str, error: int) -> DriverError:
        """What a function's error says, to be raised."""
        words = ctypes.c_char_p()
        known = self.function("cuGetErrorString")(error, ctypes.byref(words)) == 0 and words.value
        text = words.value.decode(errors="replace") if known and words.value else "unknown error"
        return DriverError(f"CUDA error: {text} ({name}: {error})")


@functools.cache
def open_driver() -> CudaDriver:
    """The driver of this machine. Raises DriverError where there is none, or another maker's."""
    if torch.version.hip is not None:
        raise DriverError("this torch is built for AMD")
    try:
        return CudaDriver(ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))
    except OSError as error:
        raise DriverError(f"NVIDIA's driver cannot be opened ({error})") from error
