"""All live settings: those that act while the model runs.

Code reads them by group (`settings.link.gbps`). Outside the process each is known by one dotted name ("link_gbps",
"eviction.lcp.rho"), so a change is a name and a value everywhere: in the UI, on the command line, in the
database, in the CSV and in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from core.settings.cache import CacheSettings
from core.settings.drafts import DraftSettings
from core.settings.kv import KVSettings
from core.settings.link import LinkSettings
from core.settings.lossy import LossySettings
from core.settings.migration import unknown
from core.settings.misses import MissSettings
from core.settings.param import Choice, Group, Param, Value, declared
from core.settings.prefetch import PrefetchSettings
from core.settings.registry import registered, shared, variant, variants
from core.settings.telemetry import TelemetrySettings

G = TypeVar("G")
GROUPS: tuple[type[Group], ...] = (
    CacheSettings,
    PrefetchSettings,
    MissSettings,
    DraftSettings,
    LinkSettings,
    KVSettings,
    TelemetrySettings,
    LossySettings,
)
# The settings that choose a variant: their choices are what is registered.
KINDS = tuple(p.name for group in GROUPS for p in declared(group).values() if p.type == "choice" and not p.choices)


def general(*groups: type) -> dict[str, Param]:
    """The settings of some groups, or of all, by name; without variants' own parameters."""
    found = [param for group in groups or GROUPS for param in declared(group).values()]
    return {
        p.name: replace(p, choices=tuple(v.name for v in variants(p.name))) if p.name in KINDS else p for p in found
    }


def params() -> dict[str, Param]:
    """Every live setting by its dotted name: those of the groups, those that variants of a kind share
    ("predictor.width"), and each variant's own ("eviction.lcp.rho")."""
    return dict(_params(GROUPS, registered()))


@lru_cache(maxsize=1)
def _params(groups: tuple[type[Group], ...], known: int) -> dict[str, Param]:
    """Those of these groups and of the variants, made anew when more than `known` are registered."""
    found = general(*groups)
    for kind in KINDS:
        own = {v.full_name(p): p for v in variants(kind) for p in v.params if not p.shared}
        found |= {f"{kind}.{name}": param for name, param in shared(kind).items()} | own
    return found


class Settings(Mapping[str, Value]):
    """An immutable, checked set of all live settings: a mapping of dotted names, and the same values by group.
    `with_` returns a changed copy; bad values change nothing."""

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        known = params()
        for name in values or {}:
            if name not in known:
                raise unknown(name, known)
        self._values = {n: p.check((values or {}).get(n, p.default)) for n, p in known.items()}
        self.cache = self._group(CacheSettings)
        self.prefetch = self._group(PrefetchSettings)
        self.misses = self._group(MissSettings)
        self.drafts = self._group(DraftSettings)
        self.link = self._group(LinkSettings)
        self.kv = self._group(KVSettings)
        self.telemetry = self._group(TelemetrySettings)
        self.lossy = self._group(LossySettings)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_(self, changes: Mapping[str, object]) -> Settings:
        """A copy with some values changed. Raises SettingError; this object never changes."""
        return Settings({**self._values, **changes})

    def diff(self, other: Settings) -> dict[str, Value]:
        """The differing values, as name -> value in `other`."""
        return {n: v for n, v in other.items() if self._values[n] != v}

    def choice(self, kind: str, name: str = "") -> Choice:
        """A variant of a kind, by default the chosen one, with the values of its own parameters."""
        chosen = variant(kind, name or str(self._values[kind]))
        return Choice(chosen.name, {p.name: self._values[chosen.full_name(p)] for p in chosen.params})

    def _group(self, group: type[G]) -> G:
        return group(**{field: self._typed(param) for field, param in declared(group).items()})

    def _typed(self, param: Param) -> object:
        return self.choice(param.name) if param.name in KINDS else param.typed(self._values[param.name])
