"""Configurations to compare, as named settings. Only the menus use them by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.errors import SettingError
from core.settings.config import KINDS, Settings
from core.settings.lossy import LossySettings
from core.settings.param import Value, declared
from core.settings.registry import variant

UNLIMITED = 64  # replacements per token: no limit in practice
PREDICTORS = ("gate", "default_vectors", "estimator", "hybrid")  # predictors whose predictions are executed
# Exact, not metered.
BASE: Mapping[str, Value] = {p.name: p.default for p in declared(LossySettings).values()} | {"quality_rate": 0.0}


@dataclass(frozen=True, slots=True)
class Mode:
    """`settings` applied over the user's own with everything lossy off. `rho_of`: rho as it was, and of how many active
    experts; `fitted` makes it the same share of another model's."""

    name: str
    title: str
    help: str
    settings: Mapping[str, Value]
    rho_of: tuple[int, int] | None = None

    def fitted(self, top_k: int) -> Mode:
        """This mode for a model with `top_k` active experts."""
        if self.rho_of is None:
            return self
        rho, of = self.rho_of
        return replace(self, settings={**self.settings, "rho": max(1, round(rho / of * top_k))}, rho_of=None)

    def over(self, settings: Settings) -> Settings:
        """All settings of this mode. Raises SettingError for an unknown one."""
        return settings.with_({**BASE, **self.settings})


def _buddies() -> Iterable[Mode]:
    """BuddyMoE section 5: substitutes for all missing experts, or for at most rho of a token's in a layer; each with
    the token gate."""
    peaked = ", except for tokens with peaked gate weights (TAE, lowest 15 %)"
    for rho in (UNLIMITED, 1, 2, 3, 4):
        name, title = ("buddy_unlimited", "Buddies") if rho == UNLIMITED else (f"buddy_rho{rho}", f"Buddies, rho {rho}")
        most = "" if rho == UNLIMITED else f", for at most {rho} of a token's experts in a layer"
        description = f"A missing expert's buddy replaces it{most}"
        settings: dict[str, Value] = {"miss": "substitute", "substitute": "buddy", "rho": rho}
        yield Mode(name, title, f"{description}.", settings)
        yield Mode(f"{name}_tae", f"{title}, TAE", f"{description}{peaked}.", {**settings, "gate": "percentile"})


# What the paper leaves open is taken from its tables: rho 4 of 6 is not no limit there, so that five of six
# experts were replaced at times, and the batch gate's beta is above 5/6.
PAPER: Mapping[str, Value] = {"predictor": "gate", "protect_super": False}  # nothing is protected there
GATED: Mapping[str, Value] = {**PAPER, "miss": "substitute", "gate": "percentile", "batch_gate": "fixed", "beta": 0.9}


def _of_the_paper() -> Iterable[Mode]:
    """The rows of BuddyMoE's tables 2 to 4 in their regime: misses that a prefetcher left, both gates on, and rho in
    proportion to the experts that are active, six there."""
    regime = "The next layer's experts are prefetched"
    yield Mode("paper_exact", "BuddyMoE's regime: exact", f"{regime}, missing ones are waited for.", PAPER)
    yield Mode(
        "paper_random",
        "BuddyMoE's regime: random resident",
        f"{regime}, a random resident expert replaces a missing one.",
        {**PAPER, **_substituted("random")},
    )
    rows = (("0.75", 4, None), ("0.95", 16, None), ("0.99", 2, None), ("0.95", 16, 3), ("0.95", 16, 4))
    for alpha, longest, rho in rows:
        most = "" if rho is None else f", rho {rho} of 6"
        yield Mode(
            f"paper_{alpha[2:]}_{longest}" + ("" if rho is None else f"_rho{rho}"),
            f"BuddyMoE's regime: alpha {alpha[1:]}, lists of {longest}{most}",
            f"{regime}; a missing one's buddy replaces it{most}, except for peaked tokens (TAE, lowest 15 %) and where "
            "nine tenths of a layer's experts are missing (beta).",
            {
                **GATED,
                "substitute": "buddy",
                "substitute.buddy.alpha": alpha,
                "substitute.buddy.k_max": longest,
                "rho": UNLIMITED,
            },
            None if rho is None else (rho, 6),
        )


def _low_beta() -> Mode:
    """The same as the paper's best row, with a batch gate that acts earlier (section 3.1)."""
    best = next(mode for mode in _of_the_paper() if mode.name == "paper_95_16_rho3")
    return replace(
        best,
        name=f"{best.name}_beta",
        title=f"{best.title}, beta .5",
        help=best.help.replace("nine tenths", "half"),
        settings={**best.settings, "beta": 0.5},
    )


def _heaviest() -> Iterable[Mode]:
    """The control of how rho is spent: as the modes of the same names, but on the experts of most weight first."""
    settings: dict[str, Value] = {"miss": "substitute", "substitute": "buddy"}
    of_rho1: dict[str, Value] = {"rho": 1, "rho_order": "heaviest"}
    help_ = "The same, but rho is spent on the experts of most gate weight first."
    yield Mode("buddy_rho1_heaviest", "Buddies, rho 1, heaviest", help_, {**settings, **of_rho1})
    yield Mode(
        "buddy_rho1_tae_heaviest", "Buddies, rho 1, TAE, heaviest", help_, {**settings, **of_rho1, "gate": "percentile"}
    )
    yield Mode("buddy_rho2_heaviest", "Buddies, rho 2, heaviest", help_, {**settings, **of_rho1, "rho": 2})
    yield Mode("drop_rho1_heaviest", "Drop, rho 1, heaviest", help_, {**_DROPPED, **of_rho1})


def _executed(predictors: Sequence[str]) -> Iterable[Mode]:
    """Speculating Experts section 4: predicted experts with their predicted weights, or with the true router's."""
    for name in predictors:
        title = variant("predictor", name).title
        for weights, mark, whose in (("predicted", "", "the predicted weights"), ("true", "_true", "the true weights")):
            yield Mode(
                f"execute_{name}{mark}",
                f"Execute: {title}{', true weights' if mark else ''}",
                f"The experts that the prefetcher predicted are computed, right or wrong, with {whose}.",
                {"predictor": name, "execute": "always", "execute_weights": weights},
            )


def _substituted(kind: str) -> dict[str, Value]:
    return {"miss": "substitute", "substitute": kind, "rho": UNLIMITED}


_DROPPED: dict[str, Value] = {"miss": "drop", "rho": UNLIMITED}
PLAIN: tuple[Mode, ...] = (
    Mode("exact", "Exact", "Every missing expert is waited for.", {}),
    Mode("random", "Random resident", "A random resident expert replaces a missing one.", _substituted("random")),
    Mode("drop", "Drop", "Missing experts are left out.", _DROPPED),
    Mode(
        "drop_renormalised",
        "Drop, renormalised",
        "Missing experts are left out, their weight goes to the token's others.",
        {**_DROPPED, "drop_renormalise": True},
    ),
    Mode(
        "drop_rho1",
        "Drop, rho 1",
        "At most one missing expert of a token's in a layer is left out.",
        {**_DROPPED, "rho": 1},
    ),
    Mode(
        "drop_rho1_tae",
        "Drop, rho 1, TAE",
        "The same, except for tokens with peaked gate weights (TAE, lowest 15 %).",
        {**_DROPPED, "rho": 1, "gate": "percentile"},
    ),
    Mode(
        "router_ranked",
        "Router's next best",
        "The resident expert with the highest router score that the token does not have yet.",
        _substituted("router_ranked"),
    ),
    Mode(
        "similar",
        "Most alike",
        "The resident expert whose outputs are most like the missing one's.",
        _substituted("similar"),
    ),
    Mode("cache_prior", "Lean towards the cache", "Routers prefer what is resident.", _substituted("cache_prior")),
    *_buddies(),
    *_heaviest(),
    *_of_the_paper(),
    _low_beta(),
    Mode(
        "verify",
        "Verify: default vectors",
        "Predictions are executed only where they carry nine tenths of the true router's weight.",
        {"predictor": "default_vectors", "execute": "verify"},
    ),
    Mode(
        "execute_prompts",
        "Execute: default vectors, true weights, prompts too",
        "As with the true weights, and prompts are read with what was predicted, too.",
        {"predictor": "default_vectors", "execute": "always", "execute_weights": "true", "execute_prefill": True},
    ),
)


def modes_of(predictors: Sequence[str] = PREDICTORS) -> tuple[Mode, ...]:
    """All modes, with the execute modes of these predictors. Raises SettingError for an unknown one."""
    return *PLAIN, *_executed(predictors)


def chosen(text: str, known: Sequence[Mode] | None = None) -> list[Mode]:
    """The modes named in a list, "all" for every mode, in the order of `known`. Raises SettingError that lists them."""
    by_name = {mode.name: mode for mode in (modes_of() if known is None else known)}
    names = [word for word in text.replace(" ", "").split(",") if word]
    if names == ["all"]:
        return list(by_name.values())
    if unknown := [name for name in names if name not in by_name]:
        raise SettingError(
            f"There is no mode {' or '.join(map(repr, unknown))}. Choose all, or some of: {', '.join(by_name)}."
        )
    if not names:
        raise SettingError(f"Name at least one mode: all, or some of {', '.join(by_name)}.")
    return [mode for name, mode in by_name.items() if name in names]


def needs(settings: Settings) -> tuple[str, ...]:
    """Parts of a profile that settings require."""
    kinds = [kind for kind in KINDS if kind != "substitute" or settings.lossy.substitutes]
    found = [part for kind in kinds for part in variant(kind, str(settings[kind])).needs]
    return tuple(dict.fromkeys([*found, *(["tae"] if settings.lossy.gate == "percentile" else [])]))


def residencies(text: str) -> list[float]:
    """Parses shares of the routed experts, each in (0, 1], largest first. Raises SettingError."""
    found: list[float] = []
    for word in text.replace(" ", "").split(","):
        try:
            share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise SettingError(
                f"residency {word!r} is not a share of the experts. Write shares above 0 and up to 1, "
                "like .75,.5 or 75%,50%."
            )
        found.append(share)
    return sorted(set(found), reverse=True)
