"""Super experts: the few experts whose outputs are so large that a model falls apart without them.

Su et al. 2025, "Unveiling Super Experts in Mixture-of-Experts Large Language Models" (arXiv 2507.23279): they cause the
massive activations between layers that attention sinks rest on, and leaving out three of the 6144 of Qwen3-30B-A3B
makes it repeat itself. Found by section 3.2.1, equation 6: with a(l, e) the largest absolute output of expert e of
layer l, an expert is super if a(l, e) is above the 99.5th percentile and above a tenth of the largest, in a layer that
forms massive activations.

How such layers are told is left open there; the first three quarters of all layers are taken, since the last ones have
large outputs, too, which take the massive activations away again. The equation and these three quarters are as another
public implementation has them, and were not checked against the paper's own text. As some expert is above a percentile
in every model, one more thing is asked, and that is ours: it must stand out from its own layer."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

DEPTH = 0.75  # share of the layers, from the first on, that are looked at
PERCENTILE = 99.5
SHARE = 0.1  # of the largest output of all
OUTLYING = 10.0  # times the median of its layer; ours


class SuperExpert(NamedTuple):
    """An expert, its largest absolute output, and how many times the median of its layer's experts that is."""

    layer: int
    expert: int
    peak: float
    ratio: float


def super_experts(peaks: npt.NDArray[Any], outlying: float = OUTLYING) -> list[SuperExpert]:
    """The super experts by `peaks` [L, E], each expert's largest absolute output before its gate weight, 0 = it was
    never chosen; largest output first. At most one in 200 of the experts looked at, rounded up. `outlying`:
    how many times its layer's median is asked of it; 0 = the paper's rule alone. L counts Mixture-of-Experts layers."""
    values, ratios = _looked_at(peaks), _ratios(peaks)
    used = values[values > 0]
    if not used.size:
        return []
    limit = max(float(np.percentile(used, PERCENTILE)), SHARE * float(used.max()))
    return _ranked(peaks, (values > limit) & (ratios[: len(values)] >= outlying))


def outstanding(peaks: npt.NDArray[Any]) -> SuperExpert | None:
    """The expert that stands out most from its layer, of those looked at, super or not; None when none was chosen."""
    ratios = _ratios(peaks)[: len(_looked_at(peaks))]
    if not ratios.any():
        return None
    return _ranked(peaks, ratios == ratios.max())[0]


def mask(peaks: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """[L, E] whether an expert is super."""
    found = np.zeros(peaks.shape, np.bool_)
    for one in super_experts(peaks):
        found[one.layer, one.expert] = True
    return found


def _looked_at(peaks: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The rows of the layers that may have super experts, at least one."""
    values: npt.NDArray[np.float64] = peaks[: max(1, round(len(peaks) * DEPTH))].astype(np.float64)
    return values


def _ratios(peaks: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """[L, E] multiples of the median of the experts of the layer that were chosen; 0 where an expert was not."""
    found = np.zeros(peaks.shape)
    for row, values in zip(found, peaks.astype(np.float64), strict=True):
        if values.any():
            row[:] = values / np.median(values[values > 0])
    return found


def _ranked(peaks: npt.NDArray[Any], which: npt.NDArray[np.bool_]) -> list[SuperExpert]:
    ratios = _ratios(peaks)
    found = [
        SuperExpert(layer, expert, float(peaks[layer, expert]), float(ratios[layer, expert]))
        for layer, expert in np.argwhere(which).tolist()
    ]
    return sorted(found, key=lambda one: (-one.peak, one.layer, one.expert))
