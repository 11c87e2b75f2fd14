"""Chooses the formats that suit a GGUF model's experts best, and describes the effect on each part.

Files mix types: a "Q4_K_M" has Q4_K, and Q6_K for some layers' down projections. So each matrix of a layer's experts
has a format of its own: the one that holds its type. Gate and up are one matrix; where their types differ, and no
format holds both, the type of most of its weights decides (in a tie, the one with more bits), and the rest is
requantised.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from core.importing.sources.codings import of_one_kind
from core.importing.sources.gguf.blocks import EXACT, HELD
from core.importing.sources.gguf.layout import routed
from core.importing.sources.gguf.tensors import PLAIN
from core.memory.codec.formats import Numbers, name_of
from core.settings.formats import FORMATS, Format
from core.system.gguf import TensorInfo

FINE = {"Q5_1": "int8-g32"}
"""Types that no format holds, and for which 4 bits would be a clear loss."""
NARROW = {"Q6_K": "int8-g32", "Q5_K": "int8-g32", "Q4_K": "int4-g32", "IQ4_XS": "iq4_nl"}
"""For types whose formats take inputs in blocks of 256, where some experts' inputs are not: codes of the last two are
kept, and their scales rounded."""
NEARLY_ALL = 0.9
"""Share of the weights from which on a format of less than 4 bits is taken."""
COARSE = "iq4_nl"
"""For the others, of less than 4 bits, among other types or where inputs are no blocks of 256. Measured on normally
distributed weights, relative to them: Q3_K is off by .151, as iq4_nl by .166 (int4-g32 .167, int3 .212); Q2_K .296,
.302 (.301, .333)."""


class FormatChoice(NamedTuple):
    """`formats` suit the experts best, by MoE layer (`core.memory.codec.formats.formats_of`); `exact`: they hold some
    of their codes unchanged; `numbers` for the blobs."""

    formats: tuple[str, ...]
    exact: bool
    numbers: Numbers
    notes: tuple[str, ...]  # one per kind of part: types, and how they are converted

    @property
    def alike(self) -> str | None:
        """The format of all matrices of all layers, if there is one."""
        return self.formats[0] if len({*self.formats}) == 1 and self.formats[0] in FORMATS else None


def choose_format(entries: Mapping[str, TensorInfo], moe_layers: Sequence[int]) -> FormatChoice:
    """Choose by the number of weights of each type in each matrix of a layer's routed experts."""
    formats, exact, plain = list[str](), False, set[torch.dtype]()
    found: dict[str, Counter[tuple[str, str]]] = {part: Counter() for part in ("gate", "up", "down")}
    for layer in moe_layers:
        pieces = {part: [entries[one.name] for one in some] for part, some in routed(entries, layer).items()}
        first, down = [*pieces.get("gate", []), *pieces["up"]], pieces["down"]
        inputs = math.gcd(*(one.shape[-1] for one in (*first, *down)))
        chosen = of_one_kind([_matrix(first), _matrix(down)], inputs)
        formats.append(name_of({"up": chosen[0], "down": chosen[1]}))
        for part, some in pieces.items():
            format = chosen[part == "down"].name
            found[part].update((one.type, conversion(one.type, format)) for one in some)
            types = {one.type for one in some}
            exact |= any(format == "checkpoint" if type in PLAIN else _keeps(format, type) for type in types)
            plain |= {PLAIN[type] for type in types if type in PLAIN}
    weight = plain.pop() if len(plain) == 1 else torch.float32
    return FormatChoice(tuple(formats), exact, Numbers(weight, torch.float16, torch.float16), _notes(found))


def _matrix(pieces: Sequence[TensorInfo]) -> Format:
    """The format for a matrix that is put together of these: one that holds all of their types, or else the best."""
    weights: Counter[str] = Counter()
    for piece in pieces:
        weights[piece.type] += torch.Size(piece.shape).numel()
    inputs = math.gcd(*(piece.shape[-1] for piece in pieces))
    held = [FORMATS[HELD[type]] for type in weights if type in HELD]
    fit = [one for one in held if inputs % (one.grain or 1) == 0 and all(map(one.holds, held))]
    return fit[0] if len(held) == len(weights) and fit else FORMATS[best_format(weights, inputs)]


def best_format(weights: Mapping[str, int], inputs: int = 0) -> str:
    """The format for experts, given the number of weights of each type and what divides all numbers of inputs."""
    wanted: Counter[str] = Counter()
    coarse = 0
    for type, count in weights.items():
        format = "checkpoint" if type in PLAIN else HELD.get(type) or FINE.get(type)
        if format is not None and inputs % (FORMATS[format].grain or 1):
            format = NARROW.get(type)
        if format is None:
            coarse += count
        else:
            wanted[format] += count
    for name in [name for name in wanted if 0 < FORMATS[name].bits < 4]:
        if wanted[name] < NEARLY_ALL * sum(weights.values()):  # what has more bits would lose much
            coarse += wanted.pop(name)
    if coarse:  # any 4-bit format is sufficient
        four = [name for name in wanted if FORMATS[name].bits == 4]
        wanted[max(four, key=wanted.__getitem__, default=COARSE)] += coarse
    return max(wanted, key=lambda name: (wanted[name], FORMATS[name].bits or 16))


def conversion(type: str, format: str) -> str:
    """How importing to `format` changes weights of a type, as shown to the user."""
    if type in PLAIN:
        return "as they are" if format == "checkpoint" else "rounded"
    if not _keeps(format, type):
        return "requantised"
    exact = type in EXACT and _holds(format, type)
    return "codes and scales kept exactly" if exact else "codes kept, scales rounded to float16"


def _keeps(format: str, type: str) -> bool:
    """Whether a format keeps the codes of a type, if not its scales."""
    return _holds(format, type) or (NARROW.get(type) == format and FORMATS[format].bits == 4)


def _holds(format: str, type: str) -> bool:
    """Whether a format has the codes and scales of a type."""
    return type in HELD and FORMATS[format].holds(FORMATS[HELD[type]])


def _notes(found: Mapping[str, Counter[tuple[str, str]]]) -> tuple[str, ...]:
    """`found`: by part, types and how they are converted."""
    notes = []
    for part, counts in found.items():
        if not counts:
            continue  # experts without gates
        total = counts.total()
        kinds = [
            f"{type}{'' if n == total else f' ({n} of {total})'}: {how}" for (type, how), n in counts.most_common()
        ]
        notes.append(f"{part}: {'; '.join(kinds)}")
    return tuple(notes)
