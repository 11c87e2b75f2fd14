"""The NVIDIA GPUs that their driver reports, whether or not torch can use them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU; memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """How busy one GPU is (percent of the time) and how warm; None where its driver does not say."""

    percent: int | None
    celsius: int | None


def nvidia_gpus() -> list[NvidiaGpu]:
    """Every GPU in the driver's order; empty without NVIDIA's driver or without its Python package (nvidia-ml-py)."""
    try:
        import pynvml as nv
    except ImportError:
        return []
    try:
        nv.nvmlInit()
        handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount())]
        memory = [nv.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        return [
            NvidiaGpu(str(nv.nvmlDeviceGetName(handle)), int(m.total), int(m.free))
            for handle, m in zip(handles, memory, strict=True)
        ]
    except nv.NVMLError:
        return []


def gpu_loads() -> list[GpuLoad]:
    """Of every GPU, in the order of `nvidia_gpus`."""
    try:
        import pynvml as nv
    except ImportError:
        return []

    def read(figure: Callable[[], int]) -> int | None:
        try:
            return int(figure())
        except nv.NVMLError:  # not on this GPU
            return None

    try:
        nv.nvmlInit()
        handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount())]
    except nv.NVMLError:
        return []
    return [
        GpuLoad(
            read(lambda one=handle: nv.nvmlDeviceGetUtilizationRates(one).gpu),  # type: ignore[misc]
            read(lambda one=handle: nv.nvmlDeviceGetTemperature(one, nv.NVML_TEMPERATURE_GPU)),  # type: ignore[misc]
        )
        for handle in handles
    ]
