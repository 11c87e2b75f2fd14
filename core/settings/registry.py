"""The registry of variants: the classes that a setting chooses among (an eviction policy, a predictor ...).

A variant's own parameters are those of its constructor (`core.settings.param`). This module refers to none by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from core.errors import SettingError
from core.settings.param import Param, Value, declared

T = TypeVar("T")
NEEDS_PROFILE = "Needs a profile of the model."


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

    def full_name(self, param: Param) -> str:
        """The name of one of its parameters among all settings: "eviction.lcp.rho", or "predictor.width" for one that
        it shares with other variants of the kind."""
        return f"{self.kind}.{param.name}" if param.shared else f"{self.kind}.{self.name}.{param.name}"

    def full_names(self, params: Mapping[str, Value]) -> dict[str, Value]:
        """Values of its parameters, under their names among all settings."""
        known = {param.name: param for param in self.params}
        return {self.full_name(known[name]): value for name, value in params.items()}


_VARIANTS: dict[str, dict[str, Variant]] = {}
_SAME: dict[str, str] = {}  # kind -> the kind whose variants it has, without their parameters


def register(kind: str, name: str, *, title: str, help: str, source: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: makes a class selectable as `name` among the variants of `kind`.

    A class with `needs` gets a sentence in its help that it needs a profile.
    """

    def add(cls: type[T]) -> type[T]:
        group = _VARIANTS.setdefault(kind, {})
        if name in group:
            raise ValueError(f"{kind} {name!r} is registered twice")
        params = tuple(declared(cls).values())
        known = shared(kind)
        for param in params:
            if param.shared and param != known.get(param.name, param):
                raise ValueError(f"{kind} {name!r} declares {param.name} otherwise than the variants it shares it with")
        text = f"{help} {NEEDS_PROFILE}" if getattr(cls, "needs", ()) else help
        group[name] = Variant(kind, name, title, text, source, params, cls)
        return cls

    return add


def same_variants(kind: str, of: str) -> None:
    """Makes every variant of one kind a variant of another, where it has its default parameters."""
    _SAME[kind] = of


def same_as(kind: str) -> str:
    """The kind whose variants it has with their default parameters, or "" when they are its own."""
    return _SAME.get(kind, "")


def registered() -> int:
    """How many variants of all kinds there are."""
    return sum(map(len, _VARIANTS.values()))


def variants(kind: str) -> tuple[Variant, ...]:
    """All variants of a kind, in order of registration."""
    return tuple(_of(kind, one) for one in _VARIANTS.get(_SAME.get(kind, kind), {}).values())


def shared(kind: str) -> dict[str, Param]:
    """The parameters that variants of a kind share, by name; each has an effect while one that has it is chosen."""
    found: dict[str, Param] = {}
    users: dict[str, list[str]] = {}
    for one in variants(kind):
        for param in one.params:
            if param.shared:
                found[param.name] = param
                users.setdefault(param.name, []).append(one.name)
    return {name: replace(param, active_when={kind: tuple(users[name])}) for name, param in found.items()}


def variant(kind: str, name: str) -> Variant:
    """Looks one up. Raises SettingError that lists the choices."""
    group = _VARIANTS.get(_SAME.get(kind, kind), {})
    if name not in group:
        raise SettingError(f"There is no {kind} called {name!r}. Choose one of: {', '.join(group)}.")
    return _of(kind, group[name])


def create(kind: str, name: str, params: Mapping[str, Value], **context: Any) -> Any:
    """Builds a variant from checked parameter values; `context` holds the arguments common to all variants
    of the kind."""
    chosen = variant(kind, name)
    known = {p.name: p for p in chosen.params}
    for key in params:
        if key not in known:
            raise SettingError(f"{kind} {name!r} has no parameter {key!r}. It has: {', '.join(known) or 'none'}.")
    values = {p.name: p.typed(p.check(params.get(p.name, p.default))) for p in chosen.params}
    return chosen.make(**context, **values)


def _of(kind: str, one: Variant) -> Variant:
    """A variant as one of this kind."""
    return replace(one, kind=kind, params=()) if kind in _SAME else one
