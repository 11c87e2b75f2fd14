"""Values kept in the store for the next start: settings, sampling, the last model, and of each model how it was loaded
and set. What cannot be read is forgotten."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from app.store.database import Database
from core.errors import MoestroError, SettingError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.migration import migrated
from core.settings.param import Value, declared
from core.settings.presets import FIRST, PRESETS, preset
from core.settings.sampling import Sampling

AUTO, KNOBS = "auto", ("budget", "eviction")  # store key; settings that Auto chooses until one is changed by hand
PRESET, RECENT, MODEL = "preset", 8, "model "  # store key; recent models; beginning of a model's store key
log = logging.getLogger("moestro.app")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Start:
    """What the load of a model begins with: its loading choices and settings, the KNOBS that Auto chooses, and the
    preset chosen last. `own`: they are of its last time, not the current ones."""

    spec: LoadSpec
    auto: frozenset[str]
    preset: str
    own: bool = False

    def with_budget(self, budget: str) -> Start:
        """The same with a budget chosen by hand. Raises SettingError."""
        settings = self.spec.settings.with_({"budget": budget})
        return replace(self, spec=replace(self.spec, settings=settings), auto=self.auto - {"budget"})


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
        except (MoestroError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            log.warning("forgot the %s of an earlier version: %s", key, error)
            return None

    def settings(self) -> Settings:
        """The live settings of the last start; before any, those that choose for themselves."""
        kept: Mapping[str, Value] | None = self._db.get("settings")
        return Settings(preset(FIRST).values) if kept is None else self._settings(kept, self.preset)

    @staticmethod
    def _settings(kept: Mapping[str, Value], chosen: str) -> Settings:
        """What was kept. Settings that are newer than it are as in the preset that was chosen, if all else is, but for
        the KNOBS."""
        settings, known = Settings(), migrated(kept)
        for name, value in known.items():
            try:
                settings = settings.with_({name: value})
            except (SettingError, TypeError, ValueError) as error:
                log.warning("forgot a setting of an earlier version: %s", error)
        wanted = next((one.values for one in PRESETS if one.name == chosen), {})
        newer = {name: value for name, value in wanted.items() if name not in known}
        as_chosen = all(settings[name] == value for name, value in wanted.items() if name not in {*KNOBS, *newer})
        return settings.with_(newer) if as_chosen else settings

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

    @property
    def preset(self) -> str:
        """The name of the preset that was chosen last; the first one's, before any."""
        name = str(self._db.get(PRESET, str) or FIRST)
        try:
            return preset(name).name
        except SettingError:  # of another version
            return FIRST

    @preset.setter
    def preset(self, name: str) -> None:
        if name != self.preset:
            self.put(PRESET, name)

    def of(self, model: str) -> Start | None:
        """How a model was loaded and set the last time; None before the first."""

        def read(kept: Any) -> Start:
            settings = self._settings(kept["settings"], str(kept["preset"]))
            auto = frozenset(map(str, kept["auto"])) & {*KNOBS}
            return Start(self._spec(kept["spec"], settings), auto, str(kept["preset"]), own=True)

        return self.result(f"{MODEL}{model}", read)

    def keep(self, start: Start) -> None:
        """How a model is loaded and set the next time."""
        spec, by = start.spec, {"auto": sorted(start.auto), "preset": start.preset}
        self.put(f"{MODEL}{spec.model}", {"spec": spec.describe(), "settings": dict(spec.settings), **by})

    def forget(self, model: str) -> None:
        """The next load of a model has the settings in force then."""
        self.put(f"{MODEL}{model}", {})

    @property
    def recent(self) -> list[str]:
        """The models loaded last, but for the demo, the newest first; some may be gone."""
        return [str(one) for one in self._db.get("recent", list) or []]

    def loaded(self, model: str) -> None:
        """A model is the newest of the `recent` ones."""
        if model != "demo":
            self.put("recent", [model, *(one for one in self.recent if one != model)][:RECENT])

    def take(self, start: Start) -> None:
        """The KNOBS and the preset from now on."""
        self.auto, self.preset = start.auto, start.preset

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
        kept: dict[str, Any] = self._db.get("spec") or {}
        return self._spec(kept, settings) if kept.get("model") is not None else None

    @staticmethod
    def _spec(kept: Mapping[str, Any], settings: Settings) -> LoadSpec:
        choices: dict[str, object] = {}
        for param in declared(LoadSpec).values():
            if param.name in kept:
                value = str(kept[param.name]) if param.type == "choice" else kept[param.name]
                try:
                    choices[param.name] = param.check(value)
                except (SettingError, TypeError, ValueError) as error:
                    log.warning("forgot a loading choice of an earlier version: %s", error)
        return LoadSpec.checked(str(kept["model"]), settings, **choices)
