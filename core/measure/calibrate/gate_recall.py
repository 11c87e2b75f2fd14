"""Recall of the next layer's router given the input of the layer before: R_{l+1}(h_l) against what layer l+1 then
chose.

Source: the baseline of Speculating Experts (section 3.3) and of MoEpic (section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from core.hf import ExpertsSite
from core.hf.watch import ask
from core.runtime.measurement import LayerRun


class GateAhead:
    """Sums over tokens; keeps one layer's states [T, H] and ids [T, k] until the next layer."""

    def __init__(self, sites: Sequence[ExpertsSite]) -> None:
        self._sites = sites
        self._found, self._cosine = np.zeros(len(sites)), np.zeros(len(sites))
        self._tokens = np.zeros(len(sites), np.int64)
        self._asked: tuple[int, torch.Tensor, torch.Tensor] | None = None  # (layer, predicted ids, previous h)

    def add(self, run: LayerRun) -> None:
        """Adds the next layer of a pass."""
        layer, states = run.seen.layer, run.seen.hidden.float()
        if self._asked is not None and self._asked[0] == layer:
            _, ids, before = self._asked
            hits = (ids[:, :, None] == run.ids[:, None, :]).any(1).sum()
            self._found[layer] += float(hits) / run.ids.shape[1]
            self._cosine[layer] += float(torch.cosine_similarity(before, states, dim=-1).sum())
            self._tokens[layer] += len(run.ids)
        self._asked = None
        if layer + 1 < len(self._sites):
            asked = ask(self._sites[layer + 1], run.seen.hidden, run.seen)
            self._asked = layer + 1, asked.topk(run.ids.shape[1], dim=-1).indices, states.clone()

    def recall(self) -> npt.NDArray[np.float32]:
        """[L] recall@k: share of layer l's choice that its router names when given h_{l-1}; [0] is NaN."""
        return _mean(self._found, self._tokens)

    def similarity(self) -> npt.NDArray[np.float32]:
        """[L-1] mean cosine of h_l and h_{l+1}."""
        return _mean(self._cosine, self._tokens)[1:]


def _mean(sums: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    return np.where(tokens > 0, sums / np.maximum(tokens, 1), np.nan).astype(np.float32)
