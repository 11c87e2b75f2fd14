"""The registry of all parameters and variants: UI, CLI, CSV and docs are generated from it.

A `Param` is one setting with its bounds and help. A `Variant` is a class (an eviction policy, a predictor) registered
under a kind, with its parameters and the paper or system it comes from. This module refers to no variant by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from core.errors import SettingError

Value = int | float | bool | str
T = TypeVar("T")
SHOWN = 80  # most characters of a wrong value that an error repeats
NEEDS_PROFILE = "Needs a profile of the model."


@dataclass(frozen=True, slots=True)
class Param:
    """One setting. `low`/`high` bound numbers inclusively; `choices` bounds texts; `live` = it can change
    between tokens."""

    name: str
    type: Literal["int", "float", "bool", "choice", "text"]
    default: Value
    help: str
    title: str = ""
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    live: bool = True
    parse: Callable[[str], Value] | None = field(default=None, compare=False, repr=False)

    def check(self, value: object) -> Value:
        """Return `value` in this parameter's type. Raises SettingError naming the bounds when it does not fit."""
        if self.type == "bool":
            if isinstance(value, bool) or value in (0, 1):
                return bool(value)
            if str(value).lower() in ("true", "false", "on", "off"):
                return str(value).lower() in ("true", "on")
            raise SettingError(f"{self.name} is on or off, not {shown(value)}.")
        if self.type == "choice":
            if str(value) in self.choices:
                return str(value)
            raise SettingError(f"{self.name} has no choice {shown(value)}. Choose one of: {', '.join(self.choices)}.")
        if self.type == "text":
            return self.parse(str(value)) if self.parse else str(value)
        return self._number(value)

    def _number(self, value: object) -> int | float:
        number = _exactly(value)
        if number is None:
            raise SettingError(f"{self.name} must be a number, not {shown(value)}.")
        if self.type == "int" and number != number // 1:  # also catches NaN and infinity
            raise SettingError(f"{self.name} must be a whole number, not {shown(value)}.")
        low, high = self.low, self.high
        if number != number or (low is not None and number < low) or (high is not None and number > high):
            unit = f" {self.unit}" if self.unit else ""
            raise SettingError(
                f"{self.name} must lie between {_short(low)} and {_short(high)}{unit}, not {_short(number)}."
            )
        return int(number) if self.type == "int" else float(number)


def _exactly(value: object) -> int | float | None:
    """A number, as int where it is whole, since a float would lose digits of a long one. None when it is
    not a number."""
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return None


def shown(value: object) -> str:
    """A value as an error shows it; long ones are cut."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**SHOWN else "a larger number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _short(number: float | None) -> str:
    """A number as text: a whole one in full unless very long."""
    if isinstance(number, int):
        return str(number) if abs(number) < 10**SHOWN else "a larger number"
    return f"{number:g}"


@dataclass(frozen=True, slots=True)
class Variant:
    """A registered class: `kind` ("eviction", "predictor"), its name, description, source, and parameters."""

    kind: str
    name: str
    title: str
    help: str
    source: str
    params: tuple[Param, ...]
    make: Callable[..., Any]

    @property
    def needs(self) -> tuple[str, ...]:
        """Parts of a profile (core.profile.PARTS) that it requires, from the class's `needs`."""
        return tuple(getattr(self.make, "needs", ()))


_VARIANTS: dict[str, dict[str, Variant]] = {}


def register(
    kind: str, name: str, *, title: str, help: str, source: str, params: tuple[Param, ...] = ()
) -> Callable[[type[T]], type[T]]:
    """Class decorator: makes a class selectable as `name` among the variants of `kind`.

    A class with `needs` gets a sentence in its help that it needs a profile.
    """

    def add(cls: type[T]) -> type[T]:
        group = _VARIANTS.setdefault(kind, {})
        if name in group:
            raise ValueError(f"{kind} {name!r} is registered twice")
        told = f"{help} {NEEDS_PROFILE}" if getattr(cls, "needs", ()) else help
        group[name] = Variant(kind, name, title, told, source, params, cls)
        return cls

    return add


def variants(kind: str) -> tuple[Variant, ...]:
    """All variants of a kind, in order of registration."""
    return tuple(_VARIANTS.get(kind, {}).values())


def variant(kind: str, name: str) -> Variant:
    """Looks one up. Raises SettingError that lists the choices."""
    group = _VARIANTS.get(kind, {})
    if name not in group:
        raise SettingError(f"There is no {kind} called {name!r}. Choose one of: {', '.join(group)}.")
    return group[name]


def create(kind: str, name: str, params: Mapping[str, Value], **context: Any) -> Any:
    """Builds a variant from checked parameter values; `context` holds the arguments common to all variants
    of the kind."""
    chosen = variant(kind, name)
    known = {p.name: p for p in chosen.params}
    for key in params:
        if key not in known:
            raise SettingError(f"{kind} {name!r} has no parameter {key!r}. It has: {', '.join(known) or 'none'}.")
    values = {p.name: p.check(params.get(p.name, p.default)) for p in chosen.params}
    return chosen.make(**context, **values)
