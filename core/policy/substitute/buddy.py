"""BuddyMoE's substitute: the expert that is most often chosen together with the missing one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from core.errors import ProfileError
from core.policy.substitute.base import Ask, Substitute, SubstituteProfile
from core.policy.substitute.buddies import MOST, Lists, alpha_of, alphas, cut, rank
from core.settings.param import Param
from core.settings.registry import register
from core.system.command import COMMAND

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Coverage = Annotated[
    str,
    Param(
        "A list ends once it covers this share of what its expert is chosen together with. "
        "One number from 0.05 to 1, or one for each layer, separated by commas.",
        title="Coverage (alpha)",
        parse=alphas,
    ),
]
Most = Annotated[
    int,
    Param(
        "The longest list: at most this many buddies are searched for one that is resident (the paper's K_max, "
        "and its search rank H).",
        title="Buddies at most",
        low=1,
        high=MOST,
        step=1,
    ),
]
Weighted = Annotated[
    bool,
    Param(
        "Count a token that chose both experts with the smaller of their two weights in place of 1.",
        title="Weighted co-activations",
        advanced=True,
    ),
]
Smoothing = Annotated[
    float,
    Param(
        "Added to every pair's count: more makes all peers more alike.",
        title="Smoothing (epsilon)",
        advanced=True,
        low=0.0,
        high=1000.0,
        step=0.1,
    ),
]
Eta = Annotated[
    float,
    Param(
        "How much the token's own router score counts: a buddy it ranks highest gains this share.",
        title="Local fit (eta)",
        advanced=True,
        low=0.0,
        high=10.0,
        step=0.1,
    ),
]


@register(
    "substitute",
    "buddy",
    title="Buddies",
    help="The resident expert that is chosen together with the missing one most often, from a list made of a profile.",
    source="BuddyMoE sections 3.1 to 3.3",
)
class Buddy(Substitute):
    """Psi(j) = q(j|i) * (1 + eta * zhat_j), zhat = the token's router logits scaled to 0..1 over all experts, for the
    buddies j of i. The paper's third factor, 1 - kappa * hop(j), is 1 on one device and omitted.

    Lists are arrays [L, E, R], 12 bytes per entry on the device; R = the longest list in use."""

    needs: ClassVar[tuple[str, ...]] = ("pairs",)
    together: ClassVar[bool] = True

    def __init__(
        self,
        alpha: Coverage = "0.95",
        k_max: Most = 16,
        weighted: Weighted = False,
        smoothing: Smoothing = 0.0,
        eta: Eta = 0.0,
    ) -> None:
        self._alpha, self._most = alpha, k_max
        self._weighted, self._smoothing, self._eta = weighted, smoothing, eta
        self.logits = eta > 0
        self.lists = Lists(np.zeros((0, 0, 0), np.int16), np.zeros((0, 0, 0), np.float32))
        self._ids: Tensor | None = None
        self._q: Tensor | None = None
        self._short: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        pairs = None if profile is None else profile.pairs_weighted if self._weighted else profile.pairs
        if pairs is None:
            weights = " with weights" if profile is not None and profile.pairs is not None else ""
            raise ProfileError(
                f"Substituting buddies needs a profile that says which experts are chosen together"
                f"{weights}. Run {COMMAND} calibrate, or open the Calibrate tab."
            )
        self._take(cut(rank(pairs, self._most), alpha_of(self._alpha, layers), self._most, self._smoothing), device)

    def _take(self, lists: Lists, device: torch.device) -> None:
        import torch

        self.lists, self._short = lists, {}
        ids, q = lists
        width = max(1, int((ids >= 0).sum(-1).max(initial=0)))  # omits columns that are empty everywhere
        ids, q = ids[..., :width], np.where(ids >= 0, q, -np.inf)[..., :width]
        self._ids = torch.from_numpy(np.maximum(ids, 0).astype(np.int64)).to(device)
        self._q = torch.from_numpy(q.astype(np.float32)).to(device)
        self.experts = ids.shape[1]
        self.bytes = 12 * ids.size if device.type != "cpu" else 0

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        found = self._list(ask.layer, expert)
        if not self.logits or not found:
            return found
        assert ask.logits is not None
        fit = ask.numbers("logits", token)
        low, high = min(fit), max(fit)
        span = high - low or 1.0
        return [(j, q * (1.0 + self._eta * ((fit[j] - low) / span))) for j, q in found]

    def _list(self, layer: int, expert: int) -> list[tuple[int, float]]:
        """The candidates of an expert, built when first requested."""
        found = self._short.get((layer, expert))
        if found is None:
            ids, q = self.lists.ids[layer, expert], self.lists.q[layer, expert]
            found = [(j, score) for j, score in zip(ids.tolist(), q.tolist(), strict=True) if j >= 0]
            self._short[layer, expert] = found
        return found

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        assert self._ids is not None and self._q is not None
        of = ask.ids[:, position]
        experts, scores = self._ids[ask.layer].index_select(0, of), self._q[ask.layer].index_select(0, of)
        if self.logits:
            assert ask.logits is not None
            fit = ask.logits.double()
            low, high = fit.amin(1, keepdim=True), fit.amax(1, keepdim=True)
            span = (high - low).masked_fill(high == low, 1.0)
            scores = scores.double() * (1.0 + self._eta * ((fit.gather(1, experts) - low) / span))
        return experts, scores

    def matrix(self, layer: int) -> Tensor | None:
        assert self._ids is not None and self._q is not None
        whole = self._q.new_zeros(self.experts, self.experts)
        return whole.scatter_reduce_(1, self._ids[layer], self._q[layer].clamp_min(0.0), "amax")
