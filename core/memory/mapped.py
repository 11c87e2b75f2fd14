"""Where a GPU reads pinned host memory: the address that its kernels use, which need not be the host's own."""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from core.errors import DeviceError


@functools.cache
def _driver() -> ctypes.CDLL:
    """NVIDIA's driver, which torch has loaded already. Raises DeviceError where there is another one."""
    if torch.version.hip is not None:
        raise DeviceError("kernels that read host memory were not tried on AMD")
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"the driver's library cannot be opened ({error})") from error


def device_address(pinned: torch.Tensor) -> int:
    """The address of registered memory in kernels. Requires a device that torch has used on this thread. Raises
    DeviceError where kernels cannot read it.

    Source: cuMemHostGetDevicePointer of the CUDA driver API. Memory that cudaHostRegister registered is mapped wherever
    there is unified addressing; on some systems at another address than the host's.
    """
    found = ctypes.c_uint64()
    error = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(pinned.data_ptr()), 0)
    if error:
        raise DeviceError(f"the driver gives pinned memory no address for kernels (CUDA error {error})")
    return found.value
