"""NVIDIA's management library as it answers on a machine with one GPU."""

from types import SimpleNamespace

import pynvml
import pytest

NAME, TOTAL, FREE = "NVIDIA Test", 8 * 10**9, 7 * 10**9


def with_gpu(patch: pytest.MonkeyPatch) -> None:
    """Until the patch ends, there is a GPU, whatever this machine has."""
    memory = SimpleNamespace(total=TOTAL, free=FREE)
    patch.setattr(pynvml, "nvmlInit", lambda: None)
    patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    patch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    patch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: NAME)
    patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: memory)


def without_driver(patch: pytest.MonkeyPatch) -> None:
    """Until the patch ends, there is no driver."""

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    patch.setattr(pynvml, "nvmlInit", fail)
