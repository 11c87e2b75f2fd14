"""Small tensors made of numbers of the host."""

from __future__ import annotations

from typing import Any

import torch


def placed(values: Any, device: torch.device) -> torch.Tensor:
    """The values as a tensor on `device`. On a GPU it is copied in the current stream, out of pinned memory, so that
    nobody waits for it."""
    host = torch.tensor(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
