"""Checks whether lossy settings are possible with this model and profile, before they are applied."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from core.errors import SettingError
from core.policy.allocation.slot_allocation import HOW, UNMEASURED
from core.settings.config import Settings
from core.settings.registry import Variant, variant, variants
from core.types import ModelShape

WITHOUT_PROFILE = "router_ranked"  # the substitute that serves every model


class Measured(Protocol):
    """The part of a profile (core.profile.Profile) that says what is in it."""

    def has(self, part: str, /) -> bool:
        """Whether this part was measured."""


class LossyProfile(Protocol):
    """The part of a profile (core.profile.Profile) that the checks need."""

    @property
    def tae(self) -> npt.NDArray[Any] | None:
        """[layers, 101] percentiles of the entropy of gate weights."""

    @property
    def tae_tempered(self) -> npt.NDArray[Any] | None:
        """[layers, temperatures, 101] the same at several temperatures."""

    @property
    def norms(self) -> npt.NDArray[Any] | None:
        """[layers, experts] mean norm of each expert's output."""


def check_allowed(settings: Settings, shape: ModelShape, profile: LossyProfile | None) -> None:
    """Raises SettingError, with advice, when a lossy setting cannot take effect."""
    lossy = settings.lossy
    if lossy.execute != "off":
        if shape.encoder_layers:
            raise SettingError("A text-to-text model cannot execute predicted experts. Set it off.")
        _check_executes(settings.prefetch.predictor.name)
        if shape.layers < 2:
            raise SettingError(
                "Executed experts are predicted from one MoE layer for the next, and this model has a single one. Set "
                "execute off."
            )
    if lossy.miss == "wait":
        return
    if lossy.gate == "percentile" and shape.encoder_layers and profile is None:
        raise SettingError(f"Token gate “percentile” {UNMEASURED}, like a threshold (tau).")
    if lossy.gate == "percentile" and (profile is None or profile.tae is None):
        what = "" if profile is None else " that has tae"
        raise SettingError(
            f"Token gate “percentile” needs a profile of this model{what}: {HOW}, then choose it again. "
            "A threshold (tau) needs none."
        )
    if lossy.gate == "percentile" and lossy.gate_temperature != 1.0 and profile and profile.tae_tempered is None:
        raise SettingError(
            f"This model's profile has percentiles of the entropy at temperature 1 only, not at "
            f"{lossy.gate_temperature:g}: measure its part tae again ({HOW}), or set the temperature to 1."
        )
    chosen = variant("substitute", lossy.substitute.name)
    if lossy.substitutes and _lacks_company(chosen, shape):
        raise SettingError(
            f"Substitute “{chosen.title}” takes an expert that tokens choose together with the missing one, and a "
            "token of this model chooses a single one. Choose another."
        )
    norms = profile.norms if profile is not None else None
    lossy.protect.eids(shape.layers, shape.experts, norms, "protect")


def with_substitute(
    settings: Settings, changes: Mapping[str, object], profile: Measured | None, shape: ModelShape
) -> Settings:
    """Settings after `changes`, with the router's next best as substitute where they turn substituting on and the one
    that was chosen before needs a profile that is not there, or cannot serve this model. One that `changes` name is
    left, to be refused."""
    if "miss" not in changes or "substitute" in changes or not settings.lossy.substitutes:
        return settings
    before = variant("substitute", settings.lossy.substitute.name)
    if all(profile is not None and profile.has(part) for part in before.needs) and not _lacks_company(before, shape):
        return settings
    return settings.with_({"substitute": WITHOUT_PROFILE})


def _lacks_company(substitute: Variant, shape: ModelShape) -> bool:
    """Whether it knows experts by those that a token chooses together, of which there are none."""
    return shape.top_k < 2 and getattr(substitute.make, "together", False)


def _check_executes(predictor: str) -> None:
    if not getattr(variant("predictor", predictor).make, "executes", False):
        able = [v.title for v in variants("predictor") if getattr(v.make, "executes", False)]
        raise SettingError(
            f"The prefetcher {variant('predictor', predictor).title!r} names no gate weights with its "
            f"experts, so they cannot be executed. Choose one of these first: {', '.join(able)}."
        )


def check_weighable(settings: Settings, rules: Callable[[], Sequence[object | None]]) -> None:
    """Raises SettingError, with advice, when gate weights are needed for experts that the router did not select, and
    the router's weighting rule is unknown. `rules` = the rules of all layers (core.hf.weighing), called only when
    needed."""
    lossy = settings.lossy
    substitute = variant("substitute", lossy.substitute.name)
    predictor = variant("predictor", settings.prefetch.predictor.name)
    needs = [
        (
            lossy.substitutes and getattr(substitute.make, "reroutes", False),
            f"{substitute.title!r} cannot be used with it. Choose another substitute.",
        ),
        (
            lossy.execute == "verify" or (lossy.execute == "always" and lossy.execute_weights == "true"),
            "predicted experts cannot be given its weights. Execute predictions always, with predicted weights.",
        ),
        (
            lossy.execute != "off" and "estimator" in predictor.needs,
            f"{predictor.title!r}, which predicts no weights, cannot be executed. Choose a prefetcher that asks the "
            "router, like the next-layer gate.",
        ),
    ]
    reasons = [why for needed, why in needs if needed]
    if reasons and not all(rules()):
        raise SettingError(f"How this model's router weighs its experts is not known, so {reasons[0]}")
