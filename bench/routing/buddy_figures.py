"""What `bench buddies` computes of a profile. Loads no model, needs no torch.

The paper draws pictures without a number from which on something is uneven or compact; the bounds here are ours, and
are in the result. L layers of E experts."""

from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import ProfileError
from core.policy.substitute.buddies import rank
from core.policy.substitute.list_lengths import COVERAGES, by_layer, lengths, percentiles
from core.profile import Profile
from core.settings.config import Settings

ALPHAS = (0.75, 0.95, 0.99)  # of the paper's tables 2 to 4
BUSY = 8  # the busiest 1 / BUSY of a layer's experts ...
OFTEN = 2.0  # ... take at least so many times their share, if a few are active far more often than the others
FEW, MOST = 4, 0.75  # 1 / FEW of an expert's peers cover more than MOST of its co-activations, if these are sparse
COMPACT, COVERED = 4, "0.95"  # half of the lists at this alpha have fewer than 1 / COMPACT of the experts
SHOWN = (5, 25, 50, 75, 95)  # percentiles


def measured(profile: Profile) -> dict[str, Any]:
    """The figures of a profile. Raises ProfileError where it lacks counts or
    pairs; without likeness `cosines` is None."""
    if profile.counts is None or profile.pairs is None:
        raise ProfileError(
            f"The profile of {profile.model} lacks how often experts are chosen, or which together. Calibrate the "
            "model again, with the parts counts and pairs."
        )
    most, few = int(Settings()["substitute.buddy.k_max"]), max(1, (profile.experts - 1) // FEW)
    at_alpha = {f"{alpha:g}": by_layer(profile.pairs, np.full(profile.layers, alpha), most) for alpha in ALPHAS}
    over = lengths(profile.pairs, COVERAGES)
    found: dict[str, Any] = {
        "busiest": busiest(profile.counts).tolist(),
        "few_peers": few,
        "few_cover": concentration(profile.pairs, few).tolist(),
        "few_popular_cover": popular(profile.counts, few).tolist(),
        "cosines": None if profile.likeness is None else cosines(profile.likeness),
        "k_max": most,
        "lists": {alpha: [row._asdict() for row in rows] for alpha, rows in at_alpha.items()},
        "numbers_by_length": {
            f"{alpha:g}": [np.bincount(one, minlength=profile.experts).tolist() for one in of]
            for alpha, of in zip(ALPHAS, lengths(profile.pairs, ALPHAS), strict=True)
        },
        "length_percentiles": {
            f"{alpha:g}": dict(zip(map(str, SHOWN), row, strict=True))
            for alpha, row in zip(COVERAGES, percentiles(over, SHOWN).T.tolist(), strict=True)
        },
    }
    medians = [row["median"] for row in found["lists"][COVERED]]
    half, shares = len(medians) // 2, [median / profile.experts for median in medians]
    return {
        **found,
        "halves": {"early": medians[:half], "late": medians[-half:] if half else []},
        "list_shares": shares,
    }


def busiest(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """[L] share of a layer's choices [L, E] that its busiest 1 / BUSY of experts take; at least one expert."""
    first = np.sort(counts, 1)[:, ::-1][:, : max(1, counts.shape[1] // BUSY)]
    found: npt.NDArray[np.float64] = first.sum(1) / np.maximum(counts.sum(1), 1)
    return found


def concentration(pairs: npt.NDArray[np.floating], few: int) -> npt.NDArray[np.float64]:
    """[L] share of an expert's co-activations [L, E, E] with its first `few` peers, mean over those that have any."""
    ranked = rank(pairs, few)
    share = ranked.together.sum(-1, dtype=np.float64) / np.where(ranked.whole > 0, ranked.whole, 1.0)
    return np.array([one[has].mean() if has.any() else 0.0 for one, has in zip(share, ranked.whole > 0, strict=True)])


def popular(counts: npt.NDArray[np.integer], few: int) -> npt.NDArray[np.float64]:
    """[L] as `concentration`, were an expert's peers chosen in proportion to their counts [L, E] alone."""
    experts = counts.shape[1]
    alone = np.repeat(counts[:, None].astype(np.float64), experts, 1)  # [L, E, E] row i: how often each j is chosen
    alone[counts == 0] = 0.0
    return concentration(alone, few)


def cosines(likeness: npt.NDArray[np.floating]) -> list[dict[str, float]]:
    """Of each layer, percentiles of the cosine of two different experts' outputs [L, E, E], and the mean of an expert's
    best."""
    apart = ~np.eye(likeness.shape[1], dtype=bool)
    return [
        {
            **{str(p): float(np.percentile(one[apart], p)) for p in SHOWN},
            "best": float(np.where(apart, one, -np.inf).max(1).mean()),
        }
        for one in likeness.astype(np.float64)
    ]
