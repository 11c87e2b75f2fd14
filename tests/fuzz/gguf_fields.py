"""Every number of a GGUF header with its place in the file, and the rules that a sound file keeps.

Written from the format's description alone, and for tests: it trusts samples to be whole, and judges mutants.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import gguf

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
MOST = 1 << 24  # elements or bytes of text that the checker reads


@dataclass(frozen=True)
class Place:
    """A number, or text (`form` "text": the bytes behind its length)."""

    offset: int
    form: str
    value: Any


@dataclass
class Fields:
    """`places` by a name such as "kv.general.alignment.value" or "tensor.3.offset"."""

    places: dict[str, Place] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # metadata; arrays as how long they are
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)  # dimensions, type, offset
    doubles: list[str] = field(default_factory=list)
    end: int = 0  # of the header


def read_fields(data: bytes) -> Fields:
    """Raises struct.error or ValueError for what cannot be read."""
    found, at = Fields(), 0

    def number(name: str, form: str) -> Any:
        nonlocal at
        value = struct.unpack_from(form, data, at)[0]
        found.places[name] = Place(at, form, value)
        at += struct.calcsize(form)
        return value

    def text(name: str) -> str:
        nonlocal at
        length = number(f"{name}.length", "<Q")
        if length > min(MOST, len(data) - at):
            raise ValueError(f"{name} is longer than the file")
        raw = data[at : at + length]
        found.places[name] = Place(at, "text", raw)
        at += length
        return raw.decode("utf-8", "surrogateescape")

    def value(name: str, kind: int) -> Any:
        if kind == TEXT:
            return text(name)
        if kind == ARRAY:
            inner, count = number(f"{name}.type", "<I"), number(f"{name}.count", "<Q")
            if count > MOST or inner == ARRAY or (inner != TEXT and inner not in SCALARS):
                raise ValueError(f"{name} is an array that nobody writes")
            for n in range(count):
                value(f"{name}.{n}", inner)
            return count
        if kind not in SCALARS:
            raise ValueError(f"{name} has no such type {kind}")
        return number(name, SCALARS[kind])

    if data[:4] != b"GGUF":
        raise ValueError("no GGUF file")
    at = 4
    if number("version", "<I") not in (2, 3):
        raise ValueError("no such version")
    tensors, pairs = number("tensors", "<Q"), number("pairs", "<Q")
    for n in range(min(pairs, MOST)):
        key = text(f"pair.{n}.key")
        if key in found.values:
            found.doubles.append(key)
        found.values[key] = value(f"pair.{n}.value", number(f"pair.{n}.type", "<I"))
    for n in range(min(tensors, MOST)):
        name = text(f"tensor.{n}.name")
        sides = number(f"tensor.{n}.dimensions", "<I")
        if sides > 4:
            raise ValueError(f"{name} has {sides} dimensions")
        shape = tuple(number(f"tensor.{n}.side.{i}", "<Q") for i in range(sides))
        if name in found.tensors:
            found.doubles.append(name)
        found.tensors[name] = (shape, number(f"tensor.{n}.type", "<I"), number(f"tensor.{n}.offset", "<Q"))
    found.end = at
    return found


def unsound(file: Path) -> str:
    """The first rule of the format that a file breaks, "" if it keeps them all: names once, types that exist, rows of
    whole blocks, tensors one after the other and aligned, none beyond the end."""
    data = file.read_bytes()
    try:
        found = read_fields(data)
    except (struct.error, ValueError) as error:
        return str(error)
    if found.doubles:
        return f"{found.doubles[0]} is there twice"
    alignment = found.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        return f"an alignment of {alignment!r}"
    start, wanted = -(-found.end // alignment) * alignment, 0
    for name, (shape, kind, offset) in found.tensors.items():
        if kind not in gguf.GGMLQuantizationType.__members__.values():
            return f"{name} has the type {kind}"
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[0] % block:
            return f"{name} has the shape {shape}"
        if offset != wanted:
            return f"{name} begins at {offset}, not {wanted}"
        count = prod(shape) // block * size
        if start + offset + count > len(data):
            return f"{name} ends behind the file"
        wanted += -(-count // alignment) * alignment
    return ""
