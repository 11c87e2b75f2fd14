"""Values kept in the store for the next start: settings, sampling, the last model. What cannot be read is forgotten."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from app.store.database import Database
from core.errors import MoestroError, SettingError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.migration import migrated
from core.settings.param import Value, declared
from core.settings.presets import FIRST, preset
from core.settings.sampling import Sampling

AUTO, KNOBS = "auto", ("budget", "eviction")  # store key; settings that Auto chooses until one is changed by hand
log = logging.getLogger("moestro.app")
R = TypeVar("R")


class Remembered:
    """Thread-safe. A value that could not be saved is tried again with the next one."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._lock = threading.Lock()
        self._owed: dict[str, object] = {}  # not saved yet

    def put(self, key: str, value: object) -> None:
        """Store a value for the next start."""
        with self._lock:
            self._owed[key] = value
            try:
                with self._db.tx():
                    for name, each in self._owed.items():
                        self._db.put(name, each)
                self._owed = {}
            except MoestroError as error:  # applying it matters more than storing it
                log.warning("could not remember %s for the next start: %s", ", ".join(self._owed), error)

    def result(self, key: str, read: Callable[[Any], R]) -> R | None:
        """What `read` makes of a stored value; None where there is none, or one of another version."""
        kept = self._db.get(key)
        try:
            return read(kept) if kept else None
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            log.warning("forgot the %s of an earlier version: %s", key, error)
            return None

    def settings(self) -> Settings:
        """The live settings of the last start; before any, those that choose for themselves."""
        kept: Mapping[str, Value] | None = self._db.get("settings")
        if kept is None:
            return Settings(preset(FIRST).values)
        settings = Settings()
        for name, value in migrated(kept).items():
            try:
                settings = settings.with_({name: value})
            except (SettingError, TypeError, ValueError) as error:
                log.warning("forgot a setting of an earlier version: %s", error)
        return settings

    @property
    def auto(self) -> frozenset[str]:
        """The KNOBS that Auto chooses, as they were not changed by hand."""
        kept = self.result(AUTO, lambda kept: frozenset(map(str, kept["of"])))
        if kept is not None:
            return kept & {*KNOBS}
        own, first = self.settings(), Settings(preset(FIRST).values)
        return frozenset(name for name in KNOBS if own[name] == first[name])

    @auto.setter
    def auto(self, knobs: Iterable[str]) -> None:
        if (wanted := frozenset(knobs)) != self.auto or not self._db.get(AUTO):
            self.put(AUTO, {"of": sorted(wanted)})

    def sampling(self) -> Sampling:
        """The sampling settings of the last start."""
        sampling, remembered = Sampling(), self._db.get("sampling")
        values: Mapping[str, Any] = remembered if isinstance(remembered, dict) else {}
        for name, value in values.items():
            try:
                sampling = Sampling.checked(**{**sampling.settings, name: value})
            except (SettingError, TypeError, ValueError) as error:
                log.warning("forgot a sampling setting of an earlier version: %s", error)
        return sampling

    def spec(self, settings: Settings) -> LoadSpec | None:
        """The spec of the last load, with these settings; None when no model was loaded yet."""
        kept: dict[str, object] = dict(self._db.get("spec") or {})
        model = kept.pop("model", None)
        if model is None:
            return None
        choices: dict[str, object] = {}
        for param in declared(LoadSpec).values():
            if param.name in kept:
                value = str(kept[param.name]) if param.type == "choice" else kept[param.name]
                try:
                    choices[param.name] = param.check(value)
                except (SettingError, TypeError, ValueError) as error:
                    log.warning("forgot a loading choice of an earlier version: %s", error)
        return LoadSpec.checked(str(model), settings, **choices)
