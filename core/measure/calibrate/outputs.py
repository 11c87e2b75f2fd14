"""Mean output of each expert, before its gate weight (Speculating Experts section 3.1), its mean norm, and its peak."""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

LARGEST = 65504.0  # of a float16


class Outputs:
    """Sums on the host, float32 [L, E, H]: the largest array of calibration. A pass adds at most 4 * (T * k + E) * H
    bytes on the device for a moment."""

    def __init__(self, layers: int, experts: int, hidden: int) -> None:
        self._sums = torch.zeros(layers, experts, hidden)
        self._counts = torch.zeros(layers, experts, dtype=torch.int64)

    def add(self, layer: int, ids: torch.Tensor, outs: torch.Tensor) -> None:
        """Adds choices [T, k] and the output of each chosen expert [T * k, H]."""
        flat = ids.reshape(-1)
        experts, hidden = self._sums.shape[1:]
        sums = torch.zeros(experts, hidden, device=outs.device).index_add_(0, flat, outs.float())
        self._sums[layer] += sums.cpu()
        self._counts[layer] += torch.bincount(flat, minlength=experts).cpu()

    def mixed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H] fp32 on the ids' device: the layer's default output D_l so far, for choices [T, k] with their
        weights."""
        means = self._sums[layer] / self._counts[layer].clamp_min(1)[:, None]
        mixed = functional.embedding_bag(ids.cpu(), means, per_sample_weights=weights.float().cpu(), mode="sum")
        return mixed.to(ids.device)

    def means(self) -> npt.NDArray[np.float16]:
        """d_{l,e} [L, E, H]; zeros for an expert that no token chose."""
        found = np.empty(tuple(self._sums.shape), np.float16)
        for row, sums, counts in zip(found, self._sums, self._counts, strict=True):  # one layer at a time: less memory
            row[:] = (sums / counts.clamp_min(1)[:, None]).clamp(-LARGEST, LARGEST).numpy()
        return found


class Norms:
    """Mean norm of each expert's output over the tokens routed to it. float64 [L, E]."""

    def __init__(self, layers: int, experts: int) -> None:
        self._sums = np.zeros((layers, experts))
        self._counts = np.zeros((layers, experts), np.int64)

    def add(self, layer: int, ids: torch.Tensor, outs: torch.Tensor) -> None:
        """Adds choices [T, k] and the output of each chosen expert [T * k, H]."""
        flat, size = ids.reshape(-1).cpu().numpy(), self._sums.shape[1]
        self._sums[layer] += np.bincount(flat, outs.float().norm(dim=-1).cpu().numpy(), size)
        self._counts[layer] += np.bincount(flat, minlength=size)

    def means(self) -> npt.NDArray[np.float32]:
        """[L, E]; 0 for an expert that no token chose."""
        return (self._sums / np.maximum(self._counts, 1)).astype(np.float32)


class Peaks:
    """Largest absolute output of each expert over the tokens routed to it, before its gate weight: what
    `core.policy.substitute.super_experts` goes by. float32 [L, E]."""

    def __init__(self, layers: int, experts: int) -> None:
        self._peaks = np.zeros((layers, experts), np.float32)

    def add(self, layer: int, ids: torch.Tensor, outs: torch.Tensor) -> None:
        """Adds choices [T, k] and the output of each chosen expert [T * k, H]."""
        largest = outs.abs().amax(-1).float().cpu().numpy()
        np.maximum.at(self._peaks[layer], ids.reshape(-1).cpu().numpy(), largest)

    def most(self) -> npt.NDArray[np.float32]:
        """[L, E]; 0 for an expert that no token chose."""
        return self._peaks
