"""The settings that may change an answer. All are off by default; see docs/settings.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from core.settings.param import Choice, Param, Value, When
from core.settings.pins import Pins

GATES = "Holds for substituting and for dropping."
REPLACES: When = {"miss": ("substitute", "drop", "substitute_drop")}
SUBSTITUTES: When = {"miss": ("substitute", "substitute_drop")}
SUBSTITUTABLE: When = {"miss": ("wait", "substitute", "substitute_drop")}  # chosen before it is turned on
DROPS: When = {"miss": ("drop", "substitute_drop")}


EXACT: Mapping[str, Value] = {"miss": "wait", "execute": "off"}  # makes answers exact, whatever else is set


@dataclass(frozen=True, slots=True)
class LossySettings:
    """What is done about missing experts, what gates it, and how its effect on answers is measured."""

    TITLE: ClassVar[str] = "Substitution"

    miss: Annotated[
        Literal["wait", "substitute", "drop", "substitute_drop"],
        Param(
            "What to do about an expert that is needed and not on the device. wait = fetch it, "
            "which is exact. substitute = compute another one that is resident in its place. drop = leave it out. "
            "substitute_drop = drop what cannot be substituted. What the gates below do not allow is waited for. "
            "A copy that is under way is always waited for. Turned on without the profile that the chosen substitute "
            "needs, the router's next best is substituted.",
            title="When an expert is missing",
            choice_titles=("Wait for it (exact)", "Use another", "Leave it out", "Use another, else leave out"),
        ),
    ] = "wait"
    substitute: Annotated[
        Choice,
        Param(
            "Which resident expert takes the place of a missing one.",
            title="Substitute",
            active_when=SUBSTITUTABLE,
            variants_active_when=SUBSTITUTES,
        ),
    ] = Choice("buddy")
    rho: Annotated[
        int,
        Param(
            "Replace or drop at most this many of a token's experts in a layer. 0 = none, so that "
            "nothing changes; as many as the model activates = no limit.",
            title="Replacements per token (rho)",
            low=0,
            high=64,
            step=1,
            active_when=REPLACES,
        ),
    ] = 3
    rho_order: Annotated[
        Literal["lightest", "heaviest"],
        Param(
            "Which experts are replaced or dropped where rho allows fewer than could be: those of least gate weight "
            "first, or those of most. BuddyMoE's tables have a rho, its Algorithm 1 has none.",
            title="Replace first",
            advanced=True,
            active_when=REPLACES,
        ),
    ] = "lightest"
    gate: Annotated[
        Literal["none", "tau", "percentile"],
        Param(
            "Leave tokens alone whose gate weights are peaked: they depend on the very experts "
            "they chose. tau = those whose entropy of the gate weights (TAE) is at most the threshold below; "
            f"percentile = the most peaked ones of each layer, as a profile saw them. {GATES}",
            title="Token gate",
            active_when=REPLACES,
        ),
    ] = "none"
    gate_tau: Annotated[
        float,
        Param(
            "Threshold of the entropy, from 0 (one expert has all the weight) to 1 (all have the same).",
            title="Entropy threshold (tau)",
            low=0.0,
            high=1.0,
            step=0.01,
            active_when={"gate": ("tau",)},
        ),
    ] = 0.5
    gate_percentile: Annotated[
        float,
        Param(
            "How many of each layer's tokens, the most peaked ones, are left alone.",
            title="Peaked tokens left alone",
            low=0.0,
            high=100.0,
            step=1.0,
            unit="%",
            active_when={"gate": ("percentile",)},
        ),
    ] = 15.0
    gate_temperature: Annotated[
        float,
        Param(
            "Softens (above 1) or sharpens the gate weights before their entropy is held against the threshold.",
            title="Temperature of the entropy",
            low=0.8,
            high=1.2,
            step=0.01,
            advanced=True,
            active_when={"gate": ("tau",)},  # a profile's percentiles are of unscaled weights
        ),
    ] = 1.0
    gate_margin: Annotated[
        float,
        Param(
            "Leave tokens alone whose first expert has at least this much more gate weight "
            f"than the second, of 1 in all. 1 = off. {GATES}",
            title="Margin (gamma)",
            low=0.0,
            high=1.0,
            step=0.01,
            advanced=True,
            active_when=REPLACES,
        ),
    ] = 1.0
    batch_gate: Annotated[
        Literal["none", "fixed", "adaptive"],
        Param(
            "Wait for all experts of a layer instead, when replacing them would touch "
            "too much. fixed = when at least a share beta of the layer's experts are missing. adaptive = as long as "
            f"loading them keeps within the transfer budget below. {GATES}",
            title="Layer gate",
            active_when=REPLACES,
        ),
    ] = "none"
    beta: Annotated[
        float,
        Param(
            "Share of a layer's requested experts.",
            title="Missing share (beta)",
            low=0.0,
            high=1.0,
            step=0.01,
            active_when={"batch_gate": ("fixed",)},
        ),
    ] = 0.5
    beta_budget: Annotated[
        float,
        Param(
            "What one forward pass may copy on demand.",
            title="Transfer budget",
            low=0.0,
            high=65536.0,
            step=0.5,
            unit="MB",
            active_when={"batch_gate": ("adaptive",)},
        ),
    ] = 64.0
    protect: Annotated[
        Pins,
        Param(
            "Experts that are never replaced or dropped: layer:expert pairs like 2:5, or top:1 "
            "for the one of every layer that a profile saw with the largest outputs. Empty = none.",
            title="Protected experts",
            parse=partial(Pins.parse, name="protect"),
            advanced=True,
            active_when=REPLACES,
        ),
    ] = Pins()
    protect_super: Annotated[
        bool,
        Param(
            "Never replace or drop a super expert, one whose outputs a profile saw to be so large that the model "
            "depends on it (Su et al. 2025). The tab Calibrate names them; there are few, if any. Without a profile "
            "that looked for them this does nothing.",
            title="Protect super experts",
            advanced=True,
            active_when=REPLACES,
        ),
    ] = True
    drop_share: Annotated[
        float,
        Param(
            "Drop an expert only if it has at most this share of the token's gate weight.",
            title="Largest weight to drop",
            low=0.0,
            high=1.0,
            step=0.01,
            advanced=True,
            active_when=DROPS,
        ),
    ] = 1.0
    drop_renormalise: Annotated[
        bool,
        Param(
            "Give the weight of dropped experts to the token's others. Reported to hurt most models.",
            title="Renormalise after dropping",
            advanced=True,
            active_when=DROPS,
        ),
    ] = False
    execute: Annotated[
        Literal["off", "verify", "always"],
        Param(
            "Compute the experts that the prefetcher named for a layer instead of those its "
            "router chooses, so that nothing has to be fetched twice. verify = only where they carry enough of the "
            "router's own weight. Works with prefetchers that ask routers.",
            title="Execute predictions",
        ),
    ] = "off"
    execute_weights: Annotated[
        Literal["predicted", "true"],
        Param(
            "Gate weights of predictions that are always executed: those that "
            "were predicted with them, or the true ones, those that the layer's own router gives to them. "
            "Verified ones have the true ones.",
            title="Weights of predictions",
            advanced=True,
            active_when={"execute": ("verify", "always")},
        ),
    ] = "predicted"
    execute_share: Annotated[
        float,
        Param(
            "Least share of the weight of the router's own choice that the predicted "
            "experts must carry. 1 = only where both agree, which is exact.",
            title="Verified share",
            low=0.0,
            high=1.0,
            step=0.01,
            advanced=True,
            active_when={"execute": ("verify",)},
        ),
    ] = 0.9
    execute_prefill: Annotated[
        bool,
        Param(
            "Execute predictions while a prompt is read, too. Off = a prompt is read with what its routers choose: it "
            "needs nearly all experts anyway, so that predicting them saves nothing.",
            title="Also in prompts",
            advanced=True,
            active_when={"execute": ("verify", "always")},
        ),
    ] = False
    quality_rate: Annotated[
        float,
        Param(
            "While something above changes answers: share of an answer's tokens that are "
            "compared with the exact model, between answers or when idle. 0 = none.",
            title="Tokens to check",
            low=0.0,
            high=1.0,
            step=0.05,
            active_when={**REPLACES, "execute": ("verify", "always")},
            resets_comparison=False,
        ),
    ] = 0.25

    @property
    def active(self) -> bool:
        """Whether these settings may change an answer."""
        return self.miss != "wait" or self.execute != "off"

    @property
    def substitutes(self) -> bool:
        """Whether an expert may be substituted for a missing one."""
        return self.miss in ("substitute", "substitute_drop")
