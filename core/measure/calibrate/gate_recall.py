"""Recall of the next layer's router run early, against what layer l+1 then chose: R_{l+1}(h_l), given the input of the
layer before, and R_{l+1}(q_{l+1}), given the quasi-hidden state.

Sources: the first is the baseline of Speculating Experts (section 3.3) and of MoEpic (section 3.2), the second the
former's own prediction (section 3.2)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from core.hf.discover import ExpertsSite
from core.hf.norms import has_quasi_hidden, quasi_hidden
from core.hf.watch import ask
from core.measure.calibrate.outputs import Outputs
from core.runtime.measurement import LayerRun


class GateAhead:
    """Sums over tokens; keeps one layer's states [T, H] and ids [T, k] until the next layer."""

    def __init__(self, sites: Sequence[ExpertsSite], outputs: Outputs | None = None) -> None:
        """`outputs`: sums of the experts' outputs over the passes before, of which the default vectors are means; None:
        nothing is counted for the quasi-hidden state."""
        self._sites, self._outputs = sites, outputs
        self._found, self._cosine = np.zeros((2, len(sites))), np.zeros(len(sites))
        self._tokens = np.zeros(len(sites), np.int64)
        self._asked: tuple[int, list[torch.Tensor], torch.Tensor] | None = None  # (layer, predicted ids, previous h)

    def add(self, run: LayerRun) -> None:
        """Adds the next layer of a pass, before its outputs are added to `outputs`."""
        layer, states = run.seen.layer, run.seen.hidden.float()
        if self._asked is not None and self._asked[0] == layer:
            _, predicted, before = self._asked
            for found, ids in zip(self._found, predicted, strict=False):
                found[layer] += float((ids[:, :, None] == run.ids[:, None, :]).any(1).sum()) / run.ids.shape[1]
            self._cosine[layer] += float(torch.cosine_similarity(before, states, dim=-1).sum())
            self._tokens[layer] += len(run.ids)
        self._asked = None
        if layer + 1 < len(self._sites):
            inputs = [run.seen.hidden, *([] if self._outputs is None else [self._quasi(run, self._outputs)])]
            asked = [ask(self._sites[layer + 1], one, run.seen) for one in inputs]
            self._asked = layer + 1, [one.topk(run.ids.shape[1], dim=-1).indices for one in asked], states.clone()

    def _quasi(self, run: LayerRun, outputs: Outputs) -> torch.Tensor:
        """[T, H] the quasi-hidden state for the next layer's router; where there is none, this router's own input, as
        in the predictor."""
        site, following = self._sites[run.seen.layer : run.seen.layer + 2]
        if run.seen.residual is None or not has_quasi_hidden(site, following):
            return run.seen.hidden
        default = outputs.mixed(run.seen.layer, run.ids, run.weights)
        return quasi_hidden(site, following, run.seen.residual, default)

    def recall(self) -> npt.NDArray[np.float32]:
        """[L] recall@k: share of layer l's choice that its router names when given h_{l-1}; [0] is NaN."""
        return _mean(self._found[0], self._tokens)

    def default_recall(self) -> npt.NDArray[np.float32] | None:
        """[L] the same given the quasi-hidden state, of default vectors as known until then; None without `outputs`."""
        return None if self._outputs is None else _mean(self._found[1], self._tokens)

    def similarity(self) -> npt.NDArray[np.float32]:
        """[L-1] mean cosine of h_l and h_{l+1}."""
        return _mean(self._cosine, self._tokens)[1:]


def _mean(sums: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    return np.where(tokens > 0, sums / np.maximum(tokens, 1), np.nan).astype(np.float32)
