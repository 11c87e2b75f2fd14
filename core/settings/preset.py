"""A preset: a named set of live settings. No code treats one specially."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.settings.cache import CacheSettings
from core.settings.config import KINDS, Settings, general, params
from core.settings.drafts import DraftSettings
from core.settings.lossy import LossySettings
from core.settings.misses import MissSettings
from core.settings.param import Value
from core.settings.prefetch import PrefetchSettings
from core.settings.registry import NEEDS_PROFILE, variant
from core.system.command import COMMAND

Kind = Literal["ours", "published", "control"]
"""Ours, a system of the literature, or what such a system is compared with."""
CALIBRATED = f"{COMMAND} calibrate --preset {{}} trains what it needs as the paper does."
NEEDS_BLOCKS = "Needs a model loaded with several blocks per expert."
_GOVERNED = tuple(
    name
    for name in general(CacheSettings, PrefetchSettings, MissSettings, DraftSettings, LossySettings)
    if name not in ("budget", "pins", "host_threads", "quality_rate")
)


@dataclass(frozen=True, slots=True)
class Preset:
    """`settings` are those that distinguish this system; all others that a preset governs have their defaults."""

    name: str
    title: str
    line: str  # what it does, at a glance; no full stop
    about: str
    source: str
    settings: Mapping[str, Value]
    calibration: Mapping[str, Value] = field(default_factory=dict)  # how its paper trains what the profile holds
    kind: Kind = "ours"

    @property
    def values(self) -> dict[str, Value]:
        """All values it sets: the kinds and their chosen variants' parameters, the scope, how prefetches are submitted,
        and everything lossy except its metering."""
        known = params()
        chosen = {kind: str(self.settings.get(kind, known[kind].default)) for kind in KINDS}
        own = {variant(*one).full_name(param) for one in chosen.items() for param in variant(*one).params}
        governed = [name for name in known if name in _GOVERNED or name in own]
        return {name: known[name].check(self.settings.get(name, known[name].default)) for name in governed}

    @property
    def needs(self) -> tuple[str, ...]:
        """Parts of a profile that it requires."""
        settings = Settings(self.values)
        kinds = [kind for kind in KINDS if kind != "substitute" or settings.lossy.substitutes]
        gate = ["tae"] if settings.lossy.gate == "percentile" else []
        found = [*gate, *(part for kind in kinds for part in variant(kind, str(settings[kind])).needs)]
        return tuple(dict.fromkeys(found))

    @property
    def lossy(self) -> bool:
        """Whether it may change answers."""
        return Settings(self.values).lossy.active

    @property
    def splits(self) -> bool:
        """Whether the model must be loaded with several blocks per expert."""
        return self.settings.get("split", "whole") != "whole"

    @property
    def help(self) -> str:
        """Its description, and whether it needs a profile or experts in blocks."""
        trained = CALIBRATED.format(self.name) if self.calibration else ""
        needs = [NEEDS_PROFILE] * bool(self.needs) + [trained] * bool(trained) + [NEEDS_BLOCKS] * self.splits
        return " ".join((self.about, *needs))
