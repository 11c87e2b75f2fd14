"""Chooses what is computed in place of missing experts, for a whole batch on its device, identically to `plain`.

The only loop is over the k positions, since each choice depends on the earlier ones. It waits for the device once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.metrics.lossy_events import Action, Why
from core.policy.substitute.base import EVEN, Ask, Candidates, Chosen, Gates, source_of
from core.policy.substitute.entropy import entropy, renormalised


@dataclass(slots=True)
class Board:
    """The decisions so far about T tokens; changed in place. `free` [T, k]: missing and open to change."""

    ids: Tensor  # int64 [T, k]
    action: Tensor  # uint8 [T, k]
    why: Tensor  # uint8 [T, k]
    free: Tensor  # bool [T, k]
    delta: float
    tae: Tensor  # fp32 [T]
    positions: list[int]  # those with any missing expert

    def chosen(self, weights: Tensor | None = None) -> Chosen:
        return Chosen(self.ids, self.action, self.why, self.delta, self.tae, weights)


def select(ask: Ask, gates: Gates, scores: Candidates | Tensor | None) -> Chosen:
    """The choice for each token. `scores`: a source of candidates, read column by column, or existing scores [T, k, E];
    None = no candidates, so nothing is substituted. A source that reroutes makes the whole choice.

    Device memory: about 12 bytes per token and candidate; a substitute has R candidates for an expert (at most E).
    Raises SettingError when the masks are not of the model's size."""
    source = source_of(ask, scores)
    if source is not None and source.reroutes:
        return source.reroute(ask, gates)
    board = open_board(ask, gates)
    if not board.positions:
        return board.chosen()
    _walk(ask, board, gates, source)
    if gates.rho < len(board.positions):
        board.free = _limit(ask, board, gates, gates.rho)
        _walk(ask, board, gates, source)
    return board.chosen()


def open_board(ask: Ask, gates: Gates) -> Board:
    """Everything that does not depend on candidates: what is missing, and which gates forbid changes."""
    lost = ask.missing.take(ask.ids)
    asked = torch.zeros_like(ask.missing)
    asked[ask.ids.flatten()] = True
    missing, every, *columns = torch.cat([(asked & ask.missing).sum()[None], asked.sum()[None], lost.sum(0)]).tolist()
    delta = missing / max(1, every)
    tae = entropy(ask.weights.double(), gates.temperature, torch)
    action = torch.where(lost, int(Action.WAIT), int(Action.EXACT)).to(torch.uint8)
    reason = torch.zeros(len(ask.ids), dtype=torch.uint8, device=ask.ids.device)
    if delta >= gates.beta:
        reason.fill_(int(Why.BETA))
    if gates.margin <= 1.0:
        reason.masked_fill_(margin(ask.weights) >= gates.margin - EVEN, int(Why.MARGIN))
    reason.masked_fill_(tae <= gates.tau + EVEN, int(Why.TAE))
    why = torch.where(lost, reason[:, None], 0).to(torch.uint8)
    free = lost & (reason == 0)[:, None]
    if gates.protected is not None:
        shielded = free & gates.protected.take(ask.ids)
        why.masked_fill_(shielded, int(Why.PROTECTED))
        free &= ~shielded
    return Board(
        ask.ids.clone(), action, why, free, delta, tae.float(), [at for at, count in enumerate(columns) if count]
    )


def drop_rest(ask: Ask, board: Board, gates: Gates, left: Tensor) -> None:
    """Drop experts that are open to change, as far as the gates allow: at most `left` [T] of each token's."""
    for position in board.positions:
        _drop(ask, board, position, gates, board.free[:, position])
    _limit(ask, board, gates, left[:, None])


def _walk(ask: Ask, board: Board, gates: Gates, source: Candidates | None) -> None:
    """Algorithm 1 over what is open to change, without a limit."""
    used = torch.zeros(len(ask.ids), len(ask.ready), dtype=torch.bool, device=ask.ids.device)
    used.scatter_(1, ask.ids, True)
    for position in board.positions:
        free = board.free[:, position]
        for option in gates.order:
            if option == "drop":
                free = _drop(ask, board, position, gates, free)
            else:
                free = _substitute(ask, board, position, gates, source, used, free)


def _limit(ask: Ask, board: Board, gates: Gates, rho: int | Tensor) -> Tensor:
    """Undo changes of what was open until rho of each token's are left; [T, k] those left. See `plain.within_rho`."""
    changed = board.free & (board.action >= int(Action.SUBSTITUTE))
    one, other = ask.weights[:, :, None], ask.weights[:, None, :]
    earlier = torch.ones(ask.ids.shape[1], ask.ids.shape[1], dtype=torch.bool, device=one.device).tril(-1)
    before = (other > one) | ((other == one) & earlier)  # [T, k, k] whether the latter comes first, heaviest first
    if gates.rho_order == "lightest":
        before = before.mT
    kept = changed & ((before & changed[:, None, :]).sum(-1) < rho)
    undone = changed & ~kept
    board.ids = torch.where(undone, ask.ids, board.ids)
    board.action.masked_fill_(undone, int(Action.WAIT))
    board.why.masked_fill_(undone, int(Why.RHO))
    return kept


def _substitute(
    ask: Ask, board: Board, position: int, gates: Gates, source: Candidates | None, used: Tensor, free: Tensor
) -> Tensor:
    """Take the best candidate if there is one; returns [T] the remaining tokens. Marks in `used` [T, E] a token's
    experts."""
    if source is None:
        return _settle(board, position, free, torch.zeros_like(free), Action.SUBSTITUTE, Why.NO_CANDIDATE)
    experts, scores = source.column(ask, position)
    if experts is None:
        ready, taken = ask.ready, used
    else:
        ready, taken = ask.ready.take(experts), used.gather(1, experts)
    best, at = scores.masked_fill(taken | ~ready, -torch.inf).max(1)  # ties: the first; no expert twice
    found = free & (best > -torch.inf)
    to = at if experts is None else experts.gather(1, at[:, None])[:, 0]
    to = torch.where(found, to, ask.ids[:, position])
    board.ids[:, position] = torch.where(free, to, board.ids[:, position])
    used.scatter_(1, to[:, None], True)
    return _settle(board, position, free, found, Action.SUBSTITUTE, Why.NO_CANDIDATE)


def _drop(ask: Ask, board: Board, position: int, gates: Gates, free: Tensor) -> Tensor:
    """Drop experts with little enough weight; returns [T] the remaining tokens."""
    wide = ask.weights.double()
    found = free & (wide[:, position] <= (gates.drop_share + EVEN) * wide.sum(1))
    board.ids[:, position] = board.ids[:, position].masked_fill(found, -1)
    return _settle(board, position, free, found, Action.DROP, Why.SHARE)


def _settle(board: Board, position: int, free: Tensor, found: Tensor, action: Action, otherwise: Why) -> Tensor:
    """Record the action for `found` tokens and the reason for the other `free` ones; returns [T] the latter."""
    left = free & ~found
    board.action[:, position] = board.action[:, position].masked_fill(found, int(action))
    why = board.why[:, position].masked_fill(left, int(otherwise))
    board.why[:, position] = why.masked_fill(found, int(Why.ALLOWED))
    return left


def margin(weights: Tensor) -> Tensor:
    """m fp64 [T] of gate weights [T, k]; see `plain.margin`."""
    shares = renormalised(weights.double(), torch)
    if shares.shape[1] < 2:
        return shares[:, 0]
    first, second = shares.topk(2).values.unbind(1)
    return first - second
