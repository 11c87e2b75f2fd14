"""What a way of computing experts is, and how leased segments are divided into those that are computed together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from core.cache.lease import LeasedSegment
from core.memory.arena import Slot
from core.memory.codec.kernels import LANES_MOST
from core.runtime.row_places import Places

TOGETHER = LANES_MOST  # resident experts of a prompt computed together
LATE = 4  # the same for experts still being copied: computes those that landed while the next are copied


class Multiply(Protocol):
    """Computes `counts[i]` consecutive rows of x [n, H] with the expert in slots[i] -> [n, H]. Without counts it is one
    row each, or the only row of x with every expert. `places` matter only to products that say so."""

    def __call__(
        self, slots: Sequence[Slot], x: torch.Tensor, counts: Sequence[int] | None = None, places: Places | None = None
    ) -> torch.Tensor: ...


Batches = Iterable[Sequence[LeasedSegment]]


@dataclass(frozen=True, slots=True)
class Product:
    """One way of computing rows with their experts. `batches(segments, rows, tokens)`: which of the segments are
    computed together, by the number of rows of each expert ({} = one row) and of the layer's tokens."""

    multiply: Multiply
    batches: Callable[[Sequence[LeasedSegment], Mapping[int, int], int], Batches]
    placed: bool = False  # whether `multiply` needs places
    adds: bool = False  # outputs are of an expert's blocks, in fp32, to be added up


def resident_first(
    segments: Sequence[LeasedSegment], rows: Mapping[int, int], tokens: int, *, late_together: bool
) -> Batches:
    """All segments without a copy to wait for, then each of the others, or these together where a launch takes longer
    than an expert."""
    resident = [one for one in segments if one.ticket is None]
    if len(resident) == len(segments):
        return (resident,) if resident else ()
    missing = [one for one in segments if one.ticket is not None]
    late = [missing] if late_together else [[one] for one in missing]
    return [resident, *late] if resident else late


def limited(
    segments: Sequence[LeasedSegment],
    rows: Mapping[int, int],
    tokens: int,
    *,
    most: int | None = None,
    together: int = TOGETHER,
    late: int = LATE,
    few: int = 0,
    room: int = 0,
) -> Iterator[list[LeasedSegment]]:
    """Resident segments first, in batches of at most `together`, and of at most `late` where some are being copied. A
    batch of several has at most `most` rows, and no more than the layer has tokens, unless that is less than there is
    `room` for. Experts of at most `few` rows are in no batch with others of more."""
    most = max(room, tokens if most is None else min(most, tokens))
    batch: list[LeasedSegment] = []
    size, kind = 0, False

    def kind_of(one: LeasedSegment) -> tuple[bool, bool]:
        return one.ticket is not None, 0 < few < rows[one.expert]

    for one in sorted(segments, key=kind_of):
        is_late, is_many = kind_of(one)
        count = rows[one.expert]
        full = size + count > most or len(batch) >= (late if is_late else together)
        if batch and (full or is_many != kind):
            yield batch
            batch, size = [], 0
        kind = is_many
        batch.append(one)
        size += count
    if batch:
        yield batch


def by_expert(segments: Sequence[LeasedSegment], rows: Mapping[int, int], tokens: int) -> Batches:
    """The segments of each expert, experts that wait for no copy first."""
    of: dict[int, list[LeasedSegment]] = {}
    for one in segments:
        of.setdefault(one.expert, []).append(one)
    return sorted(of.values(), key=lambda batch: any(one.ticket is not None for one in batch))
