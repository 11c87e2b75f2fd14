"""Default vectors: the mean of what each expert returns, before its gate weight (Speculating Experts; METHODS 5)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

LARGEST = 65504.0   # of a float16


class Outputs:
    """Sums on the host, float32 [L, E, H]: the largest thing that calibration keeps. A pass adds at most
    4 * (T * k + E) * H bytes on the device for a moment."""

    def __init__(self, layers: int, experts: int, hidden: int) -> None:
        self._sums = torch.zeros(layers, experts, hidden)
        self._counts = torch.zeros(layers, experts, dtype=torch.int64)

    def add(self, layer: int, ids: torch.Tensor, outs: torch.Tensor) -> None:
        """Choices [T, k], and what each chosen expert returned [T * k, H]."""
        flat = ids.reshape(-1)
        experts, hidden = self._sums.shape[1:]
        sums = torch.zeros(experts, hidden, device=outs.device).index_add_(0, flat, outs.float())
        self._sums[layer] += sums.cpu()
        self._counts[layer] += torch.bincount(flat, minlength=experts).cpu()

    def means(self) -> npt.NDArray[np.float16]:
        """d_{l,e} [L, E, H]; zeros for an expert that no token chose."""
        found = np.empty(tuple(self._sums.shape), np.float16)
        for row, sums, counts in zip(found, self._sums, self._counts, strict=True):   # a layer at a time: less memory
            row[:] = (sums / counts.clamp_min(1)[:, None]).clamp(-LARGEST, LARGEST).numpy()
        return found
