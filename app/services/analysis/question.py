"""The options of an analysis from the form, and the caches and the clock derived from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.services.analysis.sources import Routing, RoutingSource
from app.services.analysis.whatif import AUTO, NONE
from core.policy.predict.base import needs_recording
from core.profile import Profile
from core.settings.config import Settings
from core.settings.param import Value
from core.settings.registry import variant
from core.simulate import Clock, Config
from core.types import ModelShape

NO_TIMES = "No times are predicted: none were measured with this routing, and none were entered"
TIMES = ("compute_ms", "load_ms", "expert_ms", "miss_ms")


@dataclass(frozen=True, slots=True)
class Question:
    """Times of None and sizes of 0 stand for the values measured with the routing."""

    source: RoutingSource
    policies: tuple[str, ...] = ()
    predictors: tuple[str, ...] = (NONE,)
    budgets: str = AUTO
    kind: Literal["whatif", "lab"] = "whatif"
    most: int = 0  # m of the lab's recall@m; 0 = twice as many as the router selects
    limit: int = 0  # the last so many tokens; 0 = all
    scope: str = "layer"
    start: str = "filled"
    compute_ms: float | None = None
    load_ms: float | None = None
    expert_ms: float | None = None
    miss_ms: float | None = None
    expert_bytes: int = 0
    settings: Settings = field(default_factory=Settings)  # source of the variants' own parameters
    load: int | None = None  # the session whose times are used where a trace has none
    slots: int = 0  # of the current cache
    shape: ModelShape | None = None  # of the loaded model
    profile: Profile | None = None  # of the loaded model

    def own(self, kind: str, name: str) -> dict[str, Value]:
        """A variant's own parameters as currently set."""
        return dict(self.settings.choice(kind, name).params)

    def in_force(self, routing: Routing) -> int:
        """The current number of slots; for a model of another shape, the same share of its experts."""
        total = routing.layers * routing.experts
        return 0 if self.shape is None else min(total, round(self.slots * total / self.shape.total))

    def profile_of(self, routing: Routing) -> Profile | None:
        """The loaded model's profile if the routing is of that model, else None."""
        profile = self.profile
        return profile if profile is not None and profile.model_hash == routing.model_hash else None

    @property
    def needs_recording(self) -> bool:
        """Whether it asks for prefetchers that routing alone cannot replay."""
        return any(needs_recording(variant("predictor", name).make) for name in self.predictors)

    @property
    def bypass(self) -> bool:
        """Whether the caches have slots set aside for bypass."""
        return self.settings.cache.bypass and self.scope == "layer"

    def cache(self, routing: Routing, policy: str, slots: int, *, bypass: bool | None = None) -> Config:
        """The cache that the engine would build, with or without `bypass` or as set; for a model of another shape
        without pins and layer sizes. Raises SettingError."""
        bypass = self.bypass if bypass is None else bypass
        shape = self.shape
        mine = shape is not None and (shape.layers, shape.experts, shape.top_k) == (
            routing.layers,
            routing.experts,
            routing.top_k,
        )
        if not mine:
            aside = routing.top_k if bypass and slots < routing.layers * routing.experts else 0
            return Config(policy, slots, self.scope, self.own("eviction", policy), transit=aside)
        settings = self.settings.with_({"eviction": policy, "scope": self.scope, "bypass": bypass})
        return Config.of(settings, slots, routing.layers, routing.experts, routing.top_k, self.profile_of(routing))


def clock_of(question: Question, routing: Routing) -> tuple[Clock | None, str]:
    """The clock (typed values override measured ones) and its description; None where a needed time is in neither."""
    measured = routing.measured
    given = {name: value for name in TIMES if (value := getattr(question, name)) is not None}
    if measured is None and not {"compute_ms", "load_ms"} <= set(given):
        return None, NO_TIMES
    base = measured.clock if measured is not None else Clock(0.0, 0.0, 0.0)
    clock = Clock(**{name: given.get(name, getattr(base, name)) for name in Clock.__slots__})
    if measured is None or set(given) >= {"compute_ms", "load_ms"}:
        return clock, "times as entered"
    typed = f"; typed: {', '.join(given)}" if given else ""
    return clock, (
        f"{routing.link + ', ' if routing.link else ''}times measured over {measured.passes} tokens, which "
        f"this clock repeats within {measured.error:.0%}{typed}"
    )


def numbers(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The form's numbers; an empty field or 0 means "as measured"."""
    return {name: float(value) if value and value > 0 else None for name, value in values.items()}
