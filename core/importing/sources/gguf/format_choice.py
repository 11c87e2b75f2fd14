"""Chooses the format that suits a GGUF model's experts best, and describes the effect on each part.

Files mix types: a "Q4_K_M" has Q4_K, and Q6_K for some layers' down projections. A pack has one format for all experts,
so the type of most weights decides (in a tie, the one with more bits); the rest is requantised. For Q4_K_M that means
q4_k at 4.6 bits per weight: the sixth of the weights that had 6.6 bits is reduced to 4. int8-g32 would keep nearly
all of it, at 8.5 bits per weight.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from core.importing.sources.gguf.blocks import EXACT, HELD
from core.importing.sources.gguf.layout import routed
from core.importing.sources.gguf.tensors import PLAIN
from core.memory.codec.formats import Numbers
from core.settings.formats import FORMATS
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
    """`format` suits the experts best; `exact`: it holds most of their codes unchanged; `numbers` for its blobs."""

    format: str
    exact: bool
    numbers: Numbers
    notes: tuple[str, ...]  # one per kind of part: types, and how they are converted


def choose_format(entries: Mapping[str, TensorInfo], moe_layers: Sequence[int]) -> FormatChoice:
    """Choose by the number of weights of each type in the routed experts' matrices."""
    weights: Counter[str] = Counter()
    inputs = 0  # the greatest number that divides all
    types: dict[str, Counter[str]] = {part: Counter() for part in ("gate", "up", "down")}
    for layer in moe_layers:
        for part, pieces in routed(entries, layer).items():
            for piece in pieces:
                entry = entries[piece.name]
                weights[entry.type] += torch.Size(entry.shape).numel()
                inputs = math.gcd(inputs, entry.shape[-1])
                types[part][entry.type] += 1
    best = best_format(weights, inputs)
    exact = any(best == "checkpoint" if type in PLAIN else _keeps(best, type) for type in weights)
    plain = [PLAIN[type] for type in weights if type in PLAIN]
    weight = plain[0] if len(plain) == 1 else torch.float32
    return FormatChoice(best, exact, Numbers(weight, torch.float16, torch.float16), _notes(types, best))


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


def _notes(types: Mapping[str, Counter[str]], format: str) -> tuple[str, ...]:
    notes = []
    for part, counts in types.items():
        if not counts:
            continue  # experts without gates
        total = counts.total()
        kinds = [
            f"{type}{'' if n == total else f' ({n} of {total})'}: {conversion(type, format)}"
            for type, n in counts.most_common()
        ]
        notes.append(f"{part}: {'; '.join(kinds)}")
    return tuple(notes)
