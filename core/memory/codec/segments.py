"""Splits an expert along its inner neurons into smaller ones, whose outputs add up to the whole's.

The whole expert is encoded first and its fields are split afterwards, so that joining restores identical bytes.
Matrices that feed the inner neurons (gate, up) are split by output, gate and up alike; `down` is split by input. Data
of `down`'s outputs is either stored in every segment (the scale of a row) or only in the first (the bias; it is zero in
the others). So equal segments have equal layouts, and are the blocks that an expert is cached in (MoEpic section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.errors import SettingError
from core.memory.codec.base import Field, Layout, PartSpec
from core.memory.codec.formats import formats_of

GRAIN = 16  # neurons: start alignment that the kernels of every format support


class SegmentLayout(NamedTuple):
    """One of the segments: its inner neurons, and the byte range of its own blob in the cut one."""

    start: int
    stop: int
    offset: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The layout of an expert's parts, as the model declares them."""

    parts: Mapping[str, PartSpec]
    is_transposed: bool
    has_gate: bool
    is_concatenated: bool


class _Cut(NamedTuple):
    """How one field of a blob is split: along `axis`, with `unit` neurons per index, in `blocks` equal runs (gate, then
    up) or in `stride` interleaved ones. axis None = stored in every segment; `once` = only in the first."""

    axis: int | None
    unit: int = 1
    blocks: int = 1
    stride: int = 1
    once: bool = False


class Segments:
    """Splits blobs of one layout and joins them again, exactly. `bytes` is the size of a cut blob."""

    def __init__(self, layout: Layout, experts: ExpertParts, stops: Sequence[int]) -> None:
        """`stops`: where each segment ends, in neurons; the last one at all of them."""
        self._whole, self._experts, self._stops = layout, experts, tuple(stops)
        self._cuts = {name: _cut_of(name, field.shape, experts) for name, field in layout.fields.items()}
        offset, found = 0, []
        for start, stop in zip((0, *stops), stops, strict=False):
            small = Layout.of({n: (f.dtype, self._small(n, f.shape, start, stop)) for n, f in layout.fields.items()})
            found.append(SegmentLayout(start, stop, offset, small))
            offset += small.bytes
        self.segments, self.bytes = tuple(found), offset

    def cut(self, blob: torch.Tensor) -> torch.Tensor:
        """Split one expert's blob into its segments, one after the other: uint8 [bytes]."""
        out = torch.zeros(self.bytes, dtype=torch.uint8)
        for small, whole in self._pairs(out, blob):
            small.copy_(whole)
        return out

    def join(self, cut: torch.Tensor, blob: torch.Tensor) -> None:
        """Inverse of `cut`: writes the whole blob (uint8 [layout.bytes], zeros between its fields)."""
        blob.zero_()
        for small, whole in self._pairs(cut, blob):
            whole.copy_(small)

    def of(self, layout: Layout) -> Segments:
        """The same cuts of another layout with these fields, as that of a slot."""
        return Segments(layout, self._experts, self._stops)

    def views(self, number: int, segment: torch.Tensor) -> list[torch.Tensor]:
        """A segment's own fields in its bytes, shaped as what `places` has of them."""
        found = []
        for name, field in self._fields(number).items():
            how, small = self._cuts[name], field.view(segment)
            found.append(small if how.axis is None else small.unflatten(how.axis, (how.blocks, -1)))
        return found

    def places(self, number: int, blob: torch.Tensor) -> list[torch.Tensor]:
        """Where the numbers of a segment's fields are in the whole blob."""
        start, stop = self.segments[number][:2]
        fields = self._whole.fields
        return [_pick(fields[name].view(blob), self._cuts[name], start, stop) for name in self._fields(number)]

    def _fields(self, number: int) -> Mapping[str, Field]:
        """The fields that a segment has numbers of."""
        fields = self.segments[number].layout.fields
        return {name: field for name, field in fields.items() if not (number and self._cuts[name].once)}

    def _pairs(self, cut: torch.Tensor, blob: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields, for every field of a segment, its view and the view of the same numbers in the whole blob."""
        for number, (_, _, offset, layout) in enumerate(self.segments):
            segment = cut[offset : offset + layout.bytes]
            yield from zip(self.views(number, segment), self.places(number, blob), strict=True)

    def _small(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
        how = self._cuts[name]
        view = _pick(torch.empty(shape, device="meta"), how, start, stop)
        return tuple(view.shape if how.axis is None else view.flatten(how.axis, how.axis + 1).shape)


def inner_of(experts: ExpertParts) -> int:
    """Inner neurons of one expert: the input features of `down`."""
    return experts.parts[_down(experts)].shape[0 if experts.is_transposed else 1]


def grain_of(format: str, experts: ExpertParts) -> int:
    """Inner neurons that belong together in a format, or in those of each matrix: inputs of `down`."""
    return formats_of(format, (name for name, spec in experts.parts.items() if spec.is_weight))[_down(experts)].grain


def _down(experts: ExpertParts) -> str:
    return next(name for name, spec in experts.parts.items() if name.startswith("down") and spec.is_weight)


def stops_of(experts: ExpertParts, group: int, blocks: int) -> list[int]:
    """Where each of so many equal blocks ends, in neurons. `group` = inputs that belong together, 0 = a whole row.

    Raises SettingError when an expert cannot be cut into that many.
    """
    inner, grain = inner_of(experts), max(group, GRAIN)
    fitting = [n for n in range(1, inner // grain + 1) if inner % (n * grain) == 0]
    if blocks not in fitting:
        counts = ", ".join(map(str, fitting)) or "1"
        raise SettingError(
            f"Experts of {inner} inner neurons cannot be cut into {blocks} equal blocks of whole groups of {grain}. "
            f"Possible numbers of blocks: {counts}."
        )
    return [inner // blocks * (number + 1) for number in range(blocks)]


def specs_of(experts: ExpertParts, neurons: int) -> dict[str, PartSpec]:
    """The part specs of an expert with `neurons` inner neurons."""
    small = {}
    inner = inner_of(experts)
    for name, spec in experts.parts.items():
        shape = list(spec.shape)
        if spec.is_weight or not name.startswith("down"):
            axis = 0 if not spec.is_weight else int(name.startswith("down") != experts.is_transposed)
            shape[axis] = shape[axis] // inner * neurons
        small[name] = PartSpec(tuple(shape), spec.dtype)
    return small


def _cut_of(name: str, shape: tuple[int, ...], experts: ExpertParts) -> _Cut:
    part = name if name in experts.parts else name.rpartition(".")[0]
    spec, inner = experts.parts[part], inner_of(experts)
    down = part.startswith("down")
    if not spec.is_weight:
        return _Cut(None, once=True) if down else _up(0, shape[0], inner, experts)
    as_stored = name == part  # unquantised: the model's own layout; all others [out, in]
    if down:
        axis = 0 if as_stored and experts.is_transposed else 1
        return _Cut(axis, inner // shape[axis]) if axis < len(shape) else _Cut(None)
    axis = 1 if as_stored and experts.is_transposed else 0
    return _up(axis, shape[axis], inner, experts)


def _up(axis: int, size: int, inner: int, experts: ExpertParts) -> _Cut:
    rows = size // inner
    return _Cut(axis, blocks=rows) if experts.is_concatenated else _Cut(axis, stride=rows)


def _pick(whole: torch.Tensor, cut: _Cut, start: int, stop: int) -> torch.Tensor:
    """A view of the neurons start..stop in a field of the whole blob: its axis becomes [blocks, numbers]."""
    if cut.axis is None:
        return whole
    first, last = start // cut.unit * cut.stride, stop // cut.unit * cut.stride
    blocks: torch.Tensor = whole.unflatten(cut.axis, (cut.blocks, -1))
    return blocks.narrow(cut.axis + 1, first, last - first)
