"""Buddy lists from co-activations: which experts can replace which (BuddyMoE sections 3.2 and 3.3, equations 4 to 6).

Two steps, since the first needs the whole matrix and the second depends on settings: `rank` sorts each expert's peers,
`cut` takes the shortest prefix that covers alpha. Arrays of L layers of E experts, R peers."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import SettingError

MOST = 64  # most buddies of one expert
ALPHA = 0.05, 1.0  # bounds of the coverage
EVEN = 1e-9  # this close below alpha counts as alpha

Floats = npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]


class BuddyTable(NamedTuple):
    """Peers of each expert, the one most often chosen together with it first."""

    peers: npt.NDArray[np.int16]  # [L, E, R] -1 where there is none
    together: npt.NDArray[np.float32]  # [L, E, R] M(i, j), 0 where there is none
    whole: npt.NDArray[np.float32]  # [L, E] sum of M(i, j) over all peers, listed or not


class Lists(NamedTuple):
    """Buddies of each expert, best first."""

    ids: npt.NDArray[np.int16]  # [L, E, R] -1 after the last
    q: npt.NDArray[np.float32]  # [L, E, R] q(j|i), 0 after the last


def rank(pairs: Floats, most: int = MOST) -> BuddyTable:
    """Peers by co-activations [L, E, E]: descending M, ties to the lower id; the expert itself is not its peer."""
    layers, experts, _ = pairs.shape
    most = max(1, min(most, experts - 1))
    peers, together = np.full((layers, experts, most), -1, np.int16), np.zeros((layers, experts, most), np.float32)
    whole, each = np.zeros((layers, experts), np.float32), np.arange(experts)
    for layer in range(layers):  # one at a time, to save memory
        rows = np.asarray(pairs[layer], np.float64).copy()
        rows[each, each] = 0.0
        whole[layer] = rows.sum(1)
        rows[each, each] = -1.0  # sorts behind all others
        best = np.argsort(-rows, 1, kind="stable")[:, :most]
        kept = np.take_along_axis(rows, best, 1)
        peers[layer] = np.where(kept >= 0, best, -1)
        together[layer] = np.maximum(kept, 0.0)
    return BuddyTable(peers, together, whole)


def spread(ranked: BuddyTable) -> npt.NDArray[np.float32]:
    """Co-activations [L, E, E] from which `rank` makes the same lists: peers that were not kept get equal shares of the
    rest of the whole, each less than any that was."""
    layers, experts, most = ranked.peers.shape
    pairs = np.zeros((layers, experts, experts), np.float32)
    listed, rest = ranked.peers >= 0, experts - 1 - most
    if rest > 0:
        left = ranked.whole.astype(np.float64) - ranked.together.sum(-1, dtype=np.float64)
        below = np.nextafter(ranked.together[..., -1], np.float32(-1.0))
        pairs += np.clip(left / rest, 0.0, np.maximum(below, 0.0)).astype(np.float32)[..., None]
    layer, expert, at = np.nonzero(listed)
    pairs[layer, expert, ranked.peers[layer, expert, at]] = ranked.together[layer, expert, at]
    each = np.arange(experts)
    pairs[:, each, each] = 0.0
    return pairs


def cut(ranked: BuddyTable, alpha: npt.NDArray[Any], most: int = 16, smoothing: float = 0.0) -> Lists:
    """Buddy lists: the shortest prefix whose q adds up to alpha [L], with at least one buddy for an expert that was
    ever chosen together with another, at most `most`. q(j|i) = (M(i, j) + eps) / sum of that over all peers j."""
    q, before = covering(ranked, most, smoothing)
    kept = before < np.asarray(alpha, np.float64)[:, None, None] - EVEN
    return Lists(
        np.where(kept, ranked.peers[..., :most], -1).astype(np.int16), np.where(kept, q, 0.0).astype(np.float32)
    )


def covering(ranked: BuddyTable, most: int, smoothing: float = 0.0) -> tuple[Doubles, Doubles]:
    """(q, before) [L, E, R] of the first `most` peers: q(j|i), and what the peers before it cover of i; inf where there
    is none, so that a peer is on the list while `before` is below alpha."""
    listed, experts = ranked.peers[..., :most] >= 0, ranked.peers.shape[1]
    sums = ranked.whole.astype(np.float64) + smoothing * (experts - 1)
    q = np.where(listed, ranked.together[..., :most] + np.float64(smoothing), 0.0)
    q /= np.where(sums > 0, sums, 1.0)[..., None]
    return q, np.where(listed & (sums > 0)[..., None], q.cumsum(-1) - q, np.inf)


def alphas(text: str) -> str:
    """Validate a coverage: one number for all layers, or one for each, separated by commas. Raises SettingError."""
    words = [word for word in text.replace(";", ",").split(",") if word.strip()]
    found = []
    for word in words:
        try:
            value = float(word)
        except ValueError:
            raise SettingError(
                f"alpha {word.strip()!r} is not a number. Write one like 0.95, or one for each layer, "
                "separated by commas."
            ) from None
        if not ALPHA[0] <= value <= ALPHA[1]:
            raise SettingError(f"alpha must lie between {ALPHA[0]:g} and {ALPHA[1]:g}, not {value:g}.")
        found.append(f"{value:g}")
    if not found:
        raise SettingError("alpha is empty. Write a number like 0.95, or one for each layer, separated by commas.")
    return ", ".join(found)


def alpha_of(text: str, layers: int) -> npt.NDArray[np.float64]:
    """[L] from the text that `alphas` returned. Raises SettingError unless it has one number, or one for each layer."""
    found = np.array([float(word) for word in text.split(",")])
    if len(found) not in (1, layers):
        raise SettingError(
            f"alpha has {len(found)} numbers, but this model has {layers} layers. Write one for all, or {layers}."
        )
    return np.broadcast_to(found, (layers,)).copy()
