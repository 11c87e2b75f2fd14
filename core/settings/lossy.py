"""The settings that may change an answer. All are off by default; METHODS sections 1, 5 and 6."""

from __future__ import annotations

from collections.abc import Mapping

from core.settings.pins import Pins
from core.settings.registry import Param, Value

WAYS = ("wait", "substitute", "drop", "substitute_drop")  # of handling a miss
GATES = "Holds for substituting and for dropping."


def _protect(text: str) -> Value:
    return str(Pins.parse(text, "protect"))


LOSSY: tuple[Param, ...] = (
    Param(
        "miss",
        "choice",
        "wait",
        "What to do about an expert that is needed and not on the device. wait = fetch it, "
        "which is exact. substitute = compute another one that is resident in its place. drop = leave it out. "
        "substitute_drop = drop what cannot be substituted. What the gates below do not allow is waited for. A copy "
        "that is under way is always waited for.",
        title="On a miss",
        choices=WAYS,
    ),
    Param(
        "substitute", "choice", "buddy", "Which resident expert takes the place of a missing one.", title="Substitute"
    ),
    Param(
        "rho",
        "int",
        3,
        "Replace or drop at most this many of a token's experts in a layer. 0 = none, so that "
        "nothing changes; as many as the model activates = no limit.",
        title="Replacements per token (rho)",
        low=0,
        high=64,
        step=1,
    ),
    Param(
        "gate",
        "choice",
        "none",
        "Leave tokens alone whose gate weights are peaked: they depend on the very experts "
        "they chose. tau = those whose entropy of the gate weights (TAE) is at most the threshold below; percentile "
        f"= the most peaked ones of each layer, as a profile saw them. {GATES}",
        title="Token gate",
        choices=("none", "tau", "percentile"),
    ),
    Param(
        "gate_tau",
        "float",
        0.5,
        "Threshold of the entropy, from 0 (one expert has all the weight) to 1 (all have the same).",
        title="Entropy threshold (tau)",
        low=0.0,
        high=1.0,
        step=0.01,
    ),
    Param(
        "gate_percentile",
        "float",
        15.0,
        "How many of each layer's tokens, the most peaked ones, are left alone.",
        title="Peaked tokens left alone",
        low=0.0,
        high=100.0,
        step=1.0,
        unit="%",
    ),
    Param(
        "gate_temperature",
        "float",
        1.0,
        "Softens (above 1) or sharpens the gate weights before their entropy is held against the threshold.",
        title="Temperature of the entropy",
        low=0.8,
        high=1.2,
        step=0.01,
    ),
    Param(
        "gate_margin",
        "float",
        1.0,
        "Leave tokens alone whose first expert has at least this much more gate weight "
        f"than the second, of 1 in all. 1 = off. {GATES}",
        title="Margin (gamma)",
        low=0.0,
        high=1.0,
        step=0.01,
    ),
    Param(
        "batch_gate",
        "choice",
        "none",
        "Wait for all experts of a layer instead, when replacing them would touch "
        "too much. fixed = when at least a share beta of the layer's experts are missing. adaptive = as long as "
        f"loading them keeps within the transfer budget below. {GATES}",
        title="Layer gate",
        choices=("none", "fixed", "adaptive"),
    ),
    Param(
        "beta",
        "float",
        0.5,
        "Share of a layer's requested experts.",
        title="Missing share (beta)",
        low=0.0,
        high=1.0,
        step=0.01,
    ),
    Param(
        "beta_budget",
        "float",
        64.0,
        "What one forward pass may copy on demand.",
        title="Transfer budget",
        low=0.0,
        high=65536.0,
        step=0.5,
        unit="MB",
    ),
    Param(
        "protect",
        "text",
        "",
        "Experts that are never replaced or dropped: layer:expert pairs like 2:5, or top:1 "
        "for the one of every layer that a profile saw with the largest outputs. Empty = none.",
        title="Protected experts",
        parse=_protect,
    ),
    Param(
        "drop_share",
        "float",
        1.0,
        "Drop an expert only if it has at most this share of the token's gate weight.",
        title="Largest weight to drop",
        low=0.0,
        high=1.0,
        step=0.01,
    ),
    Param(
        "drop_renormalise",
        "bool",
        False,
        "Give the weight of dropped experts to the token's others. Reported to hurt most models.",
        title="Renormalise after dropping",
    ),
    Param(
        "execute",
        "choice",
        "off",
        "Compute the experts that the prefetcher named for a layer instead of those its "
        "router chooses, so that nothing has to be fetched twice. verify = only where they carry enough of the "
        "router's own weight. Works with prefetchers that ask routers.",
        title="Execute predictions",
        choices=("off", "verify", "always"),
    ),
    Param(
        "execute_weights",
        "choice",
        "predicted",
        "Gate weights of predictions that are always executed: those that "
        "were predicted with them, or the true ones, those that the layer's own router gives to them. "
        "Verified ones have the true ones.",
        title="Weights of predictions",
        choices=("predicted", "true"),
    ),
    Param(
        "execute_share",
        "float",
        0.9,
        "Least share of the weight of the router's own choice that the predicted "
        "experts must carry. 1 = only where both agree, which is exact.",
        title="Verified share",
        low=0.0,
        high=1.0,
        step=0.01,
    ),
    Param(
        "quality_rate",
        "float",
        0.25,
        "While something above changes answers: share of an answer's tokens that are "
        "compared with the exact model, between answers or when idle. 0 = none.",
        title="Tokens to check",
        low=0.0,
        high=1.0,
        step=0.05,
    ),
)


def substitutes(settings: Mapping[str, Value]) -> bool:
    """Whether these settings allow an expert to be substituted for a missing one."""
    return str(settings["miss"]).startswith("substitute")


def is_lossy(settings: Mapping[str, Value]) -> bool:
    """Whether these settings may change an answer."""
    return settings["miss"] != "wait" or settings["execute"] != "off"
