"""Summarizes a profile, one line per part, for the command line and the dashboard."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from core.policy.substitute.super_experts import SuperExpert, outstanding, super_experts
from core.profile.profile import Profile

TITLES = {
    "counts": "Activations",
    "pairs": "Co-activations",
    "defaults": "Default vectors",
    "gate_recall": "Next-layer gate",
    "tae": "Gate entropy",
    "maps": "Expert maps",
    "likeness": "Alike experts",
    "norms": "Output norms",
    "peaks": "Super experts",
    "curves": "Hit curves",
    "times": "Measured times",
    "estimator": "Estimator",
    "path": "Routing-path predictor",
}

NAMED = 8  # super experts named, of more than that


def describe(profile: Profile) -> dict[str, str]:
    """Part -> summary in the user's words; only gathered parts."""
    return {part: _SAID[part](profile) for part in profile.parts()}


def _counts(profile: Profile) -> str:
    assert profile.counts is not None
    shares = np.sort(profile.counts, axis=1)[:, ::-1].cumsum(1) / np.maximum(profile.counts.sum(1, keepdims=True), 1)
    quarter = max(1, profile.experts // 4)
    unused = int((profile.counts == 0).sum())
    return (
        f"the busiest quarter of a layer's experts takes {shares[:, quarter - 1].mean():.0%} of the choices; "
        f"{f'{unused} of {profile.counts.size} experts were' if unused else 'none was'} never chosen"
    )


def _pairs(profile: Profile) -> str:
    weighted = "" if profile.pairs_weighted is None else ", also by weight"
    return f"how often two experts of a layer were chosen together{weighted}"


def _defaults(profile: Profile) -> str:
    return f"{profile.layers * profile.experts} mean expert outputs of {profile.hidden} numbers"


def _gate(profile: Profile) -> str:
    assert profile.gate_recall is not None and profile.similarity is not None
    recall = profile.default_recall
    quasi = "" if recall is None else f", and {np.nanmean(recall):.1%} on quasi-hidden states"
    return (
        f"names {np.nanmean(profile.gate_recall):.1%} of the next layer's experts{quasi}; states of neighbouring "
        f"layers have a cosine of {np.nanmean(profile.similarity):.2f}"
    )


def _tae(profile: Profile) -> str:
    assert profile.tae is not None
    low, middle, high = (float(profile.tae[:, p].mean()) for p in (10, 50, 90))
    return f"{middle:.2f} for half of the tokens, {low:.2f} for a tenth, {high:.2f} for nine tenths, at most"


def _maps(profile: Profile) -> str:
    assert profile.maps is not None
    return f"{len(profile.maps)} maps"


def _likeness(profile: Profile) -> str:
    best = best_pairs(profile)
    return (
        f"the most alike experts of a layer have outputs with a cosine of {best.min():.2f} to {best.max():.2f}, "
        "by layer"
    )


def _norms(profile: Profile) -> str:
    assert profile.norms is not None
    ratios = [row.max() / np.median(row[row > 0]) for row in profile.norms if row.any()]
    low, high = min(ratios, default=1.0), max(ratios, default=1.0)
    return f"a layer's largest mean output is {low:.1f} to {high:.1f} times its median"


def _peaks(profile: Profile) -> str:
    assert profile.peaks is not None
    found = super_experts(profile.peaks)
    if not found:
        most = outstanding(profile.peaks)
        return f"none; {_peak(most)} stands out most" if most else "none"
    named = ", ".join(map(_peak, found[:NAMED]))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{len(found)}, protected by default from being substituted or dropped: {named}{more}"


def _peak(one: SuperExpert) -> str:
    return f"{one.layer}:{one.expert} (output up to {one.peak:.3g}, {one.ratio:.3g} times its layer's median)"


def best_pairs(profile: Profile) -> npt.NDArray[np.float32]:
    """[L] cosine of the two most similar experts of a layer: a measure of redundancy. Needs part likeness."""
    assert profile.likeness is not None
    cosines = profile.likeness.astype(np.float32)
    each = np.arange(profile.experts)
    cosines[:, each, each] = -1.0
    best: npt.NDArray[np.float32] = cosines.max((1, 2))
    return best


def _curves(profile: Profile) -> str:
    curves = profile.curves()
    assert curves is not None
    half = curves.hit[:, curves.experts // 2]
    return (
        f"with half of its experts cached, a layer hits {half.min():.1%} to {half.max():.1%} of its requests; its "
        f"router, run early, is right in {curves.recall.min():.1%} to {curves.recall.max():.1%} of them"
    )


def _times(profile: Profile) -> str:
    assert profile.times is not None
    description, at = profile.settings.get("times"), profile.times
    emulated = isinstance(description, dict) and description.get("link") == "emulated"
    return (
        f"attention {at['att']:.3g} ms and experts {at['moe']:.3g} ms a layer, the rest {at['head']:.3g} ms; one "
        f"expert is copied in {at['load']:.3g} ms{' over an emulated link' if emulated else ''}"
    )


def _trained(part: str) -> Callable[[Profile], str]:
    def description(profile: Profile) -> str:
        recall = profile.settings.get("recall")
        found = [r for r in recall.get(part, ()) if r is not None] if isinstance(recall, dict) else []
        size = sum(t.numel() * t.element_size() for name, t in profile.nets.items() if name.startswith(f"{part}."))
        named = f"names {np.mean(found):.1%} of the experts on what it was not trained on; " if found else ""
        return f"{named}{_training(profile, part)}{size / 1e6:.1f} MB"

    return description


def _training(profile: Profile, part: str) -> str:
    """What a network was trained on, as far as it is known."""
    config, gathered = profile.settings.get(part), profile.settings.get("gathered")
    if part == "path" and isinstance(gathered, dict) and (wrote := profile.settings.get("path_texts")):
        known = gathered.get(part)
        tokens = f"{known['tokens']:,} tokens" if isinstance(known, dict) and "tokens" in known else "texts"
        return f"trained on {tokens} {'that the model wrote itself' if wrote == 'generated' else 'read'}; "
    if part != "estimator" or not isinstance(config, dict) or "width" not in config:
        return ""
    state = "quasi-hidden states" if config.get("quasi") else "router inputs"
    known = gathered.get(part) if isinstance(gathered, dict) and "quasi" in config else None  # before, of all tokens
    tokens = f" of {known['tokens']:,} tokens" if isinstance(known, dict) and "tokens" in known else ""
    return f"width {config['width']}, trained on the {state}{tokens}; "


_SAID: dict[str, Callable[[Profile], str]] = {
    "counts": _counts,
    "pairs": _pairs,
    "defaults": _defaults,
    "gate_recall": _gate,
    "tae": _tae,
    "maps": _maps,
    "likeness": _likeness,
    "norms": _norms,
    "peaks": _peaks,
    "curves": _curves,
    "times": _times,
    "estimator": _trained("estimator"),
    "path": _trained("path"),
}
