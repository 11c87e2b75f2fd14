"""What holds the codes of a quantized checkpoint's experts: a format for each matrix of each layer."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from core.hf.checkpoint import CheckpointReader
from core.importing.sources.decoded import Decoded
from core.importing.sources.fp8 import Fp8Matrix
from core.memory.codec.formats import FORMATS, Format, Numbers, name_of

SAMPLES = 6  # matrices of a kind that are read, spread over the model; deviating ones are noticed when they are read
PLAIN = FORMATS["checkpoint"]


class Coding(NamedTuple):
    """`format`: what holds the codes of a matrix; PLAIN where there are none, or transformers dequantises them; None
    where none does. `numbers`: the type of its scales, or of plain weights. `bits` of a code."""

    format: Format | None
    numbers: torch.dtype
    bits: int

    @property
    def near(self) -> Format:
        """Its format, or the smallest that loses next to nothing: of as many bits, or of 8."""
        return self.format or FORMATS["int4-g32" if self.bits == 4 else "int8-g32"]


def codings(tensors: Decoded, names: Iterable[str]) -> dict[str, Coding]:
    """How each of these weights can be held, found from a few of each kind."""
    alike: dict[object, list[str]] = {}
    for name in names:
        matrix = tensors.matrices.get(name)
        alike.setdefault(tensors.tensors[name].dtype if matrix is None else matrix.layout, []).append(name)
    found = [(some, _coding(tensors, some)) for some in alike.values()]
    return {name: coding for some, coding in found for name in some}


def _coding(tensors: Decoded, names: Sequence[str]) -> Coding:
    """Of weights that are stored alike."""
    matrix, numbers = tensors.matrices.get(names[0]), tensors.tensors[names[0]].dtype
    if matrix is None or isinstance(matrix, Fp8Matrix):
        return Coding(PLAIN, numbers, 8)
    chosen = dict.fromkeys(names[i * (len(names) - 1) // (SAMPLES - 1)] for i in range(SAMPLES))
    codes = [tensors.coded(name, 0 if len(matrix.shape) == 3 else None) for name in chosen]
    seen = {None if one is None else (one.format, one.scale.dtype) for one in codes}
    only = next(iter(seen)) if len(seen) == 1 else None
    return Coding(None, numbers, matrix.bits) if only is None else Coding(FORMATS[only[0]], only[1], matrix.bits)


def by_layer(tensors: Decoded, reader: CheckpointReader, dtype: torch.dtype) -> tuple[tuple[str, ...], Numbers | None]:
    """The formats of each layer's experts, and number types that lose nothing of what they hold; None where they hold
    nothing. `dtype`: of what is rounded."""
    names = [
        {
            part: [name for expert in range(site.num_experts) for name in reader.names_of(layer, expert, part)]
            for part, spec in site.parts.items()
            if spec.is_weight
        }
        for layer, site in enumerate(reader.sites)
    ]
    found = codings(tensors, (name for parts in names for some in parts.values() for name in some))
    formats, kept = list[str](), set[Coding]()
    for site, parts in zip(reader.sites, names, strict=True):
        each = [Counter(found[name] for name in some) for some in parts.values()]
        inputs = math.gcd(*(site.parts[part].shape[0 if site.is_transposed else 1] for part in parts))
        chosen = of_one_kind([_matrix(one) for one in each], inputs)
        formats.append(name_of(dict(zip(parts, chosen, strict=True))))
        for format, some in zip(chosen, each, strict=True):
            kept |= {one for one in some if one.format is not None and format.holds(one.format)}
    weights, scales = set[torch.dtype](), set[torch.dtype]()
    for coding in kept:
        if coding.format == PLAIN:
            weights.add(coding.numbers)
        elif coding.format is not None and not coding.format.scale:
            scales.add(coding.numbers)
    return tuple(formats), Numbers(_one(weights, dtype), _one(scales, dtype), torch.float32) if kept else None


def _matrix(codings: Counter[Coding]) -> Format:
    """The format for a matrix that is put together of these: one that holds all of them, or else that of most (in a
    tie, the one with more bits)."""
    held = [one.format for one in codings if one.format is not None]
    fit = [one for one in held if all(map(one.holds, held))]
    if len(held) == len(codings) and fit:
        return fit[0]
    wanted = Counter[Format]()
    for coding, count in codings.items():
        wanted[coding.near] += count
    return max(wanted, key=lambda one: (wanted[one], one.bits or 16))


def of_one_kind(chosen: Sequence[Format], inputs: int) -> list[Format]:
    """The formats of an expert's matrices, in codes all, or none: else plain numbers are rounded to 8 bits. `inputs`:
    what divides all numbers of inputs."""
    if len({one.is_plain for one in chosen}) == 1:
        return [*chosen]
    coded = FORMATS["int8-g32" if inputs % 32 == 0 else "int8"]
    return [coded if one.is_plain else one for one in chosen]


def _one(types: set[torch.dtype], usual: torch.dtype) -> torch.dtype:
    """A number type that holds these; `usual` where there are none."""
    return usual if not types else types.pop() if len(types) == 1 else torch.float32
