"""Routing biased towards resident experts: both the selection and the weights are computed again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar

from core.metrics.lossy_events import Action, Why
from core.policy.substitute.base import Ask, Chosen, Gates, Substitute, SubstituteProfile
from core.settings.param import Param
from core.settings.registry import register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NONE = -float("inf")


@register(
    "substitute",
    "cache_prior",
    title="Lean towards the cache",
    help="Resident experts get a bonus before the "
    "router's top-k, and the weights are the router's own for what it then chooses.",
    source="control; cache-prior routing",
)
class CachePrior(Substitute):
    """top-k of logit + lambda * (max - min of the token's logits) * [resident].

    Selected experts that are resident or being copied keep their places, since nothing below them gains more than they
    do; missing ones and resident ones that were not selected compete for the rest, with ties won by missing ones. A
    token that would change more than rho of its experts, or that a gate excludes, stays unchanged. Experts still
    missing may then be dropped, if the gates' order says so."""

    reroutes: ClassVar[bool] = True
    logits: bool = True

    def __init__(
        self,
        lean: Annotated[
            float,
            Param(
                "The bonus, as a share of the distance between the token's largest and smallest router logit (lambda).",
                title="Bonus (lambda)",
                low=0.0,
                high=1.0,
                step=0.01,
            ),
        ] = 0.3,
    ) -> None:
        self._lean = lean

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        self.experts = experts

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        return ()

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        return None, ask.weights.new_full((len(ask.ids), len(ask.ready)), NONE)

    def reroute(self, ask: Ask, gates: Gates) -> Chosen:
        """New ids, at the positions of replaced experts, and new weights where `ask.weigh` is given."""
        import torch

        from core.policy.substitute import batch

        ask.check(self.experts)
        board = batch.open_board(ask, gates)
        if not board.positions:
            return board.chosen()
        weights = None
        if "substitute" in gates.order:
            stays, comes = self._ranked(ask, board.free)
            moved = stays.logical_not()  # [T, k] not in the new top-k
            fits = moved.sum(1) <= gates.rho
            left = board.free & torch.where(fits[:, None], stays, False)
            board.why.masked_fill_(board.free & ~fits[:, None], int(Why.RHO)).masked_fill_(left, int(Why.NO_CANDIDATE))
            moved &= fits[:, None]
            at = (moved.cumsum(1) - 1).clamp_min(0)  # the n-th best newcomer replaces the n-th that leaves
            board.ids = torch.where(moved, comes.gather(1, at), ask.ids)
            board.action.masked_fill_(moved, int(Action.SUBSTITUTE))
            board.why.masked_fill_(moved, int(Why.ALLOWED))
            board.free = left
            if ask.weigh is not None:
                new = ask.weigh(board.ids).to(ask.weights.dtype)
                weights = torch.where(moved.any(1, keepdim=True), new, ask.weights)
        if "drop" in gates.order:
            batch.drop_rest(ask, board, gates, gates.rho - (board.action >= int(Action.SUBSTITUTE)).sum(1))
        return board.chosen(weights)

    def _ranked(self, ask: Ask, free: Tensor) -> tuple[Tensor, Tensor]:
        """(which selected experts [T, k] stay, ids [T, k] of the newcomers, best first)."""
        import torch

        assert ask.logits is not None
        fit, k = ask.logits.double(), ask.ids.shape[1]
        bonus = self._lean * (fit.amax(1, keepdim=True) - fit.amin(1, keepdim=True))
        had = fit.gather(1, ask.ids).masked_fill(~free, float("inf"))
        others = (fit + bonus).masked_fill(~ask.ready, NONE).scatter(1, ask.ids, NONE)
        best = torch.cat([had, others], 1).sort(dim=1, descending=True, stable=True).indices[:, :k]
        stays = torch.zeros(len(best), k + fit.shape[1], dtype=torch.bool, device=best.device)
        stays.scatter_(1, best, True)
        newcomers = (best < k).int().argsort(dim=1, stable=True)  # sorts newcomers to the front
        return stays[:, :k], (best.gather(1, newcomers) - k).clamp_min(0)
