"""Chooses what is computed in place of missing experts: Algorithm 1 in plain Python, token by token.

Used for a single decoded token, and as the reference for `batch`. `pick` is the fast version: lists in, lists out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, nan
from typing import TYPE_CHECKING, NamedTuple

from core.metrics.lossy_events import Action, Why
from core.policy.substitute.base import EVEN, Ask, Candidates, Chosen, Gates, source_of
from core.policy.substitute.entropy import entropy_of_token

if TYPE_CHECKING:
    from torch import Tensor

Listed = Callable[[int, int], Iterable[tuple[int, float]]]
"""(position, expert) -> its candidates with their scores: `Candidates.listed` of one token."""
EXACT, WAIT, SUBSTITUTE, DROP = (int(a) for a in (Action.EXACT, Action.WAIT, Action.SUBSTITUTE, Action.DROP))
ALLOWED, TAE, MARGIN, BETA, RHO, PROTECTED, NO_CANDIDATE, SHARE = (int(why) for why in Why)


class Picked(NamedTuple):
    """One token's part of `Chosen`."""

    ids: list[int]
    action: list[int]
    why: list[int]
    tae: float


def pick(
    ids: Sequence[int],
    weights: Sequence[float],
    missing: Sequence[bool],
    ready: Sequence[bool],
    gates: Gates,
    listed: Listed,
    delta: float = nan,
) -> Picked:
    """One token: its experts [k] and weights [k], flags [E], and the function that lists the candidates for a position
    (called only when needed). `delta` as in `Chosen`; by default computed from this token alone."""
    found, action, why = list(ids), [EXACT] * len(ids), [ALLOWED] * len(ids)
    tae = entropy_of_token(weights, gates.temperature)
    lost = [at for at, expert in enumerate(ids) if missing[expert]]
    if not lost:
        return Picked(found, action, why, tae)
    share = len({ids[at] for at in lost}) / len(set(ids)) if delta != delta else delta
    if closed := _closed(weights, tae, share, gates):
        for at in lost:
            action[at], why[at] = WAIT, closed
        return Picked(found, action, why, tae)

    def walk(positions: Iterable[int]) -> None:
        """Algorithm 1 over these positions, without a limit."""
        used = set(ids)
        for at in positions:
            found[at], action[at], why[at] = _decided(at, ids, weights, ready, used, gates, listed)

    walk(lost)
    changed = [at for at in lost if action[at] != WAIT]
    if len(changed) > gates.rho:
        for at in changed:
            found[at], action[at], why[at] = ids[at], WAIT, RHO
        walk(within_rho(changed, weights, gates))
    return Picked(found, action, why, tae)


def within_rho(changed: Sequence[int], weights: Sequence[float], gates: Gates) -> list[int]:
    """The positions that rho leaves of `changed`, in the router's order. Lightest first is the reverse of heaviest
    first, where ties go to the router's earlier choice."""
    order = sorted(changed, key=lambda at: (-weights[at], at))
    if gates.rho_order == "lightest":
        order.reverse()
    return sorted(order[: gates.rho])


def _decided(
    at: int,
    ids: Sequence[int],
    weights: Sequence[float],
    ready: Sequence[bool],
    used: set[int],
    gates: Gates,
    listed: Listed,
) -> tuple[int, int, int]:
    """(expert, action, why) of the missing expert at a position; adds its substitute to `used`."""
    if ids[at] in gates.shielded:
        return ids[at], WAIT, PROTECTED
    reason = ALLOWED
    for option in gates.order:
        if option == "drop":
            if weights[at] <= (gates.drop_share + EVEN) * sum(weights):
                return -1, DROP, ALLOWED
            reason = SHARE
        else:
            best = _best(listed(at, ids[at]), ready, used)
            if best >= 0:
                used.add(best)
                return best, SUBSTITUTE, ALLOWED
            reason = NO_CANDIDATE
    return ids[at], WAIT, reason


def _closed(weights: Sequence[float], tae: float, delta: float, gates: Gates) -> int:
    """Why this token may not be changed at all; ALLOWED = it may."""
    if tae <= gates.tau + EVEN:
        return TAE
    if gates.margin <= 1.0 and margin(weights) >= gates.margin - EVEN:
        return MARGIN
    return BETA if delta >= gates.beta else ALLOWED


def _best(listed: Iterable[tuple[int, float]], ready: Sequence[bool], used: set[int]) -> int:
    """The candidate with the highest score that the token does not have, ties to the first; -1 when there is none."""
    best, top = -1, -inf
    for expert, score in listed:
        if ready[expert] and expert not in used and score > top:
            best, top = expert, score
    return best


def margin(weights: Sequence[float]) -> float:
    """m = the largest renormalised gate weight minus the second largest, in [0, 1]; 1 when there is only one."""
    whole = sum(weights)
    if whole <= 0.0:
        return 0.0
    best = sorted(weights)
    return (best[-1] - (best[-2] if len(best) > 1 else 0.0)) / whole


def select(ask: Ask, gates: Gates, scores: Candidates | Tensor | None) -> Chosen:
    """The choice for each token, over Python lists. `scores`: a source of candidates, or existing scores [T, k, E];
    None = no candidates, so nothing is substituted. A source that reroutes makes the whole choice.

    Raises SettingError when the masks are not of the model's size."""
    import torch

    source = source_of(ask, scores)
    if source is not None and source.reroutes:
        return source.reroute(ask, gates)
    missing, ready = ask.missing.tolist(), ask.ready.tolist()
    ids, weights = ask.ids.tolist(), ask.weights.tolist()
    asked = {expert for row in ids for expert in row}
    delta = sum(missing[expert] for expert in asked) / max(1, len(asked))
    picked = [
        pick(row, weights[token], missing, ready, gates, _listed(source, ask, token), delta)
        for token, row in enumerate(ids)
    ]
    device, shape = ask.ids.device, ask.ids.shape
    return Chosen(
        torch.tensor([one.ids for one in picked], device=device).view(shape),
        torch.tensor([one.action for one in picked], dtype=torch.uint8, device=device).view(shape),
        torch.tensor([one.why for one in picked], dtype=torch.uint8, device=device).view(shape),
        delta,
        torch.tensor([one.tae for one in picked], dtype=torch.float32, device=device),
    )


def _listed(source: Candidates | None, ask: Ask, token: int) -> Listed:
    if source is None:
        return lambda position, expert: ()
    return lambda position, expert: source.listed(ask, token, position, expert)
