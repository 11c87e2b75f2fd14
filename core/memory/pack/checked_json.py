"""A manifest's JSON as typed values. Errors name the path of a value that is missing, mistyped or out of bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

FLOATS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}
DTYPES = FLOATS | {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}
MOST = 1 << 50  # upper bound of byte sizes and all other counts


class InvalidValue(ValueError):
    """An invalid value in a manifest; the text completes a sentence about the file."""


class CheckedObject:
    """One JSON object with typed access by name. Every method raises InvalidValue."""

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, dict):
            raise InvalidValue(f"its {path.rstrip('.') or 'content'} is {values!r:.60}, not an object")
        self._values: Mapping[str, Any] = values
        self._path = path

    def names(self) -> list[str]:
        """Its keys, in order."""
        return list(self._values)

    def only(self, *names: str) -> None:
        """Require exactly these keys."""
        if set(self._values) != set(names):
            odd = sorted(set(self._values) ^ set(names))[0]
            raise InvalidValue(f"its {self._path}{odd[:60]} {'is unknown' if odd in self._values else 'is missing'}")

    def whole(self, name: str, least: int = 0, most: int = MOST) -> int:
        return whole(self._take(name), f"{self._path}{name}", least, most)

    def text(self, name: str) -> str:
        found: str = self._of(name, str, "a text")
        return found

    def flag(self, name: str) -> bool:
        found: bool = self._of(name, bool, "true or false")
        return found

    def values(self, name: str) -> list[Any]:
        found: list[Any] = self._of(name, list, "a list")
        return found

    def object(self, name: str) -> CheckedObject:
        return CheckedObject(self._take(name), f"{self._path}{name}.")

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape: one or two dimensions, none of them 0."""
        sizes = self.values(name)
        if not 1 <= len(sizes) <= 2:
            raise InvalidValue(f"its {self._path}{name} is {sizes!r:.60}, not a shape")
        return tuple(whole(size, f"{self._path}{name}", 1) for size in sizes)

    def dtype(self, name: str, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
        found = known.get(self.text(name))
        if found is None:
            raise InvalidValue(f"its {self._path}{name} is {self.text(name)!r:.60}, not a number type")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """An object whose values are all strings."""
        inner = self.object(name)
        return {key: inner.text(key) for key in inner.names()}

    def _take(self, name: str) -> Any:
        if name not in self._values:
            raise InvalidValue(f"its {self._path}{name[:60]} is missing")
        return self._values[name]

    def _of(self, name: str, kind: type[Any], wanted: str) -> Any:
        value = self._take(name)
        if not isinstance(value, kind):
            raise InvalidValue(f"its {self._path}{name} is {value!r:.60}, not {wanted}")
        return value


def whole(value: Any, path: str, least: int, most: int = MOST) -> int:
    """Return `value` if it is an integer within bounds; else raises InvalidValue."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidValue(f"its {path} is {value!r:.60}, not a whole number from {least:,} to {most:,}")
    return value
