"""Small tensors on a device, made of numbers of the host."""

from typing import Any

import torch


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values as a tensor on `device`, of `dtype` or the one that they have; a tensor keeps its own. On a GPU it is
    copied in the current stream, out of pinned memory, so that the host does not wait for it."""
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
