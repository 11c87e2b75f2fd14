"""What a setting is: bounds, help and title of one value, written where the value is declared.

A field of a settings group, or a parameter of a variant's constructor, is annotated with its `Param`. The type, the
choices and the default are taken from the declaration itself, so each stands once:

    gbps: Annotated[float, Param("Bandwidth of the emulated link.", title="Bandwidth", low=0.001, high=128.0)] = 1.0
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from core.errors import SettingError

Value = int | float | bool | str  # as it stands in the database, a CSV, a log or an option
Type = Literal["int", "float", "bool", "choice", "text"]
When = Mapping[str, tuple[Value, ...]]  # other settings -> values; one that holds is enough
SHOWN = 80  # most characters of a wrong value that an error repeats


class Choice(NamedTuple):
    """A chosen variant (see core.settings.registry) and the values of its own parameters; others have their
    defaults."""

    name: str
    params: Mapping[str, Value] = {}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Param:
    """One setting. `low`/`high` bound numbers inclusively; `choices` bounds texts. `name` is the outer one: by default
    the field's."""

    help: str
    title: str = ""
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()
    choice_titles: tuple[str, ...] = ()  # what the dashboard calls them, in their order; by default as they are
    unit: str = ""
    parse: Callable[[str], Any] | None = field(default=None, compare=False, repr=False)  # a text -> the field's type
    advanced: bool = False  # on the command line, listed by --help-all alone
    active_when: When | None = field(default=None, compare=False)  # it has an effect while ...; None: always
    variants_active_when: When | None = field(default=None, compare=False)  # of a kind: its variants' own parameters do
    shared: bool = False  # of variants' own parameters: one setting of the kind, for all variants that have it
    in_blocks: bool = False  # it has an effect where the model was loaded with several blocks per expert
    on_gpu: bool = False  # it has an effect where the model is on a GPU
    resets_comparison: bool = True  # a change starts the live comparison of cache policies anew
    name: str = ""
    type: Type = "text"
    default: Value = ""

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
            return str(self.parse(str(value))) if self.parse else str(value)
        return self._number(value)

    def typed(self, value: Value) -> Any:
        """A checked value as its field holds it."""
        return self.parse(str(value)) if self.parse else value

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


class Group(Protocol):
    """A dataclass of settings."""

    TITLE: ClassVar[str]  # over its controls


_DECLARED: dict[type[Any], Mapping[str, Param]] = {}


def declared(cls: type[Any]) -> Mapping[str, Param]:
    """Every annotated field of a dataclass, or parameter of a constructor, with its complete Param. Raises TypeError
    for one without a default."""
    if cls not in _DECLARED:
        found = {}
        hints = get_type_hints(cls if is_dataclass(cls) else cls.__init__, include_extras=True)
        for name, given in inspect.signature(cls).parameters.items():
            hint = hints.get(name)
            base, *extras = get_args(hint) if get_origin(hint) is Annotated else (None,)
            for param in extras:
                if isinstance(param, Param):
                    if given.default is given.empty:
                        raise TypeError(f"{cls.__name__}.{name} is a setting without a default")
                    found[name] = _completed(param, name, base, given.default)
        _DECLARED[cls] = found
    return _DECLARED[cls]


def checked_values(cls: type[Any], values: Mapping[str, object], kind: str) -> dict[str, Any]:
    """Untrusted values of a class's declared fields, each converted and within its bounds. `kind`: what the error calls
    such a setting. Raises SettingError for an unknown name or a bad value, with the names or the bounds."""
    known = declared(cls)
    for name in values:
        if name not in known:
            raise SettingError(f"There is no {kind} setting called {name!r}. Settings: {', '.join(known)}.")
    return {name: known[name].check(value) for name, value in values.items()}


def _completed(param: Param, name: str, base: Any, default: object) -> Param:
    """The Param with its name, type, choices and default."""
    value = default if isinstance(default, int | float | bool | str) else str(default)
    choices = get_args(base) if get_origin(base) is Literal else param.choices
    kinds: dict[Any, Type] = {int: "int", float: "float", bool: "bool", Choice: "choice"}
    kind: Type = "choice" if choices else kinds.get(base, "text")
    return replace(param, name=param.name or name, type=kind, choices=choices, default=value)


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
