"""What caches of every size would hit while a text is read token by token, and what each layer's router says early: the
statistics that MoEpic's configurator plans from (section 3.4.2), with its cache policy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.hf.discover import ExpertsSite
from core.hf.watch import Seen, ask
from core.policy.eviction import policy_maker
from core.profile.trace.ranking import NONE
from core.runtime.measurement import LayerRun
from core.settings.param import Choice
from core.simulate.curves import CurveMeter
from core.types import ModelShape

TOKENS = 5000  # measured at most: as many as MoEpic plans from (section 4.1)
POLICY = "lcp"


class HitCurves:
    """The first TOKENS tokens read, each as if it were decoded. Layer l's ranking is its router's, given the input of
    the layer before; layer 0's, given the last layer's input of the token before."""

    def __init__(self, sites: Sequence[ExpertsSite], shape: ModelShape) -> None:
        self._sites = sites
        self._meter = CurveMeter(shape.layers, shape.experts, shape.top_k, policy_maker(Choice(POLICY)))
        self._ids: list[npt.NDArray[Any]] = []  # of the pass, by layer, [T, k]
        self._ranked: list[npt.NDArray[np.int16]] = []  # likewise [T, E], of the layers after the first
        self._first: npt.NDArray[np.int16] = np.full((1, shape.experts), NONE, np.int16)  # layer 0's next ranking

    def add(self, run: LayerRun) -> None:
        """Adds the next layer of a pass."""
        if self._meter.tokens >= TOKENS:
            return
        layer = run.seen.layer
        if layer == 0:
            self._ids.clear()  # of a pass that broke off
            self._ranked.clear()
        self._ids.append(run.ids.cpu().numpy())
        if layer + 1 < len(self._sites):
            self._ranked.append(_ranking(self._sites[layer + 1], run.seen))
            return
        after = _ranking(self._sites[0], run.seen)
        first, self._first = np.concatenate([self._first, after[:-1]]), after[-1:]
        ids, ranked = np.stack(self._ids, 1), np.stack([first, *self._ranked], 1)
        for at in range(min(len(ids), TOKENS - self._meter.tokens)):
            self._meter.add(ids[at], ranked[at])

    @property
    def tokens(self) -> int:
        """Tokens measured."""
        return self._meter.tokens

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """The profile's arrays; none when nothing was read."""
        if not self.tokens:
            return {}
        curves = self._meter.curves()
        arrays = {"curve_hit": curves.hit, "curve_chosen": curves.chosen, "curve_cached": curves.cached}
        return {name: array.astype(np.float32) for name, array in arrays.items()}


def _ranking(site: ExpertsSite, seen: Seen) -> npt.NDArray[np.int16]:
    """[T, E] the experts of `site` by what its router says to this layer's input, the likeliest first."""
    order: torch.Tensor = ask(site, seen.hidden, seen).argsort(dim=-1, descending=True, stable=True)
    return order.to(torch.int16).cpu().numpy()
