"""The NVIDIA GPUs that their driver reports, whether or not torch can use them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU; memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


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
