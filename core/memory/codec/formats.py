"""The number types in a blob; re-exports the registry of formats, `core.settings.formats`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from core.errors import SettingError
from core.settings.formats import FORMATS, Format, format_of

__all__ = ["FORMATS", "Format", "Numbers", "format_of", "formats_of", "label_of", "name_of", "numbers_of"]

BETWEEN = "/"  # formats of an expert's matrices


SCALES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
"""Number types of scales that a format prescribes; uint8: exponents, 2 ** (e - 127). Zeros beside int8 are int8."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Number types in a blob: of plain weights and biases, scales and zeros. Independent of the compute dtype."""

    weight: torch.dtype
    scale: torch.dtype
    zero: torch.dtype


def numbers_of(format: Format, dtype: torch.dtype, stored: Numbers | None) -> Numbers:
    """`stored`, or `dtype` for all of them; a format with a fixed number type keeps it."""
    numbers = stored or Numbers(dtype, dtype, dtype)
    if format.bits == 16:
        return Numbers(getattr(torch, format.name), numbers.scale, numbers.zero)
    scale = SCALES.get(format.scale, numbers.scale)
    return Numbers(numbers.weight, scale, scale if format.wide else numbers.zero)


def formats_of(name: str, weights: Iterable[str]) -> dict[str, Format]:
    """The format of each of an expert's matrices, which are `weights`. `name`: that of all of them, or, in their order,
    one for each: "q4_k/q6_k". Raises SettingError for an unknown one, for another number of them, and where some
    are of plain numbers and some of codes."""
    parts, found = [*weights], [format_of(one) for one in name.split(BETWEEN)]
    if len(found) == 1:
        found *= len(parts)
    if len(found) != len(parts):
        raise SettingError(f"The formats {name!r} are not those of {len(parts)} matrices.")
    if len({one.is_plain for one in found}) > 1:
        raise SettingError(f"An expert cannot be held in plain numbers and in codes: {name}.")
    return dict(zip(parts, found, strict=True))


def name_of(formats: Mapping[str, Format]) -> str:
    """The inverse: one name where all matrices have the same format."""
    names = [one.name for one in formats.values()]
    return names[0] if len({*names}) == 1 else BETWEEN.join(names)


def label_of(layers: Iterable[str]) -> str:
    """What a model's experts are held in, given the name of each layer's formats: "q4_k", or "q4_k+q6_k", those of most
    matrices first."""
    counts: Counter[str] = Counter()
    for name in layers:
        names = name.split(BETWEEN)
        counts.update({one: names.count(one) * 2 // len(names) for one in names})
    return "+".join(name for name, _ in counts.most_common())
