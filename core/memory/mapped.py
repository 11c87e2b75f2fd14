"""Where a GPU reads pinned host memory: the address that its kernels use, which need not be the host's own."""

import ctypes

import torch

from core.errors import DeviceError
from core.memory.cuda_driver import DriverError, open_driver


def device_address(pinned: torch.Tensor) -> int:
    """The address of registered memory in kernels. Requires a device that torch has used on this thread. Raises
    DeviceError where kernels cannot read it.

    Source: cuMemHostGetDevicePointer of the CUDA driver API. Memory that cudaHostRegister registered is mapped wherever
    there is unified addressing; on some systems at another address than the host's.
    """
    found = ctypes.c_uint64()
    try:
        open_driver().call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), pinned.data_ptr(), 0)
    except DriverError as error:
        raise DeviceError(f"kernels have no address of pinned memory ({error})") from error
    return found.value
