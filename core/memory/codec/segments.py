"""Splits an expert along its inner neurons into two smaller ones, top and bottom, whose outputs add up to the whole's.

The whole expert is encoded first and its fields are split afterwards, so that joining restores identical bytes.
Matrices that feed the inner neurons (gate, up) are split by output, gate and up alike; `down` is split by input. Data
of `down`'s outputs is either stored in both segments (the scale of a row) or only in the top (the bias).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.errors import SettingError
from core.memory.codec.base import Layout, PartSpec

GRAIN = 16  # neurons: start alignment that the kernels of every format support


class SegmentLayout(NamedTuple):
    """One of the two segments: its inner neurons, and the byte range of its own blob in the cut one."""

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
    up) or in `stride` interleaved ones. axis None = stored in both segments; `once` = only in the top."""

    axis: int | None
    unit: int = 1
    blocks: int = 1
    stride: int = 1
    once: bool = False


class Segments:
    """Splits blobs of one layout and joins them again, exactly. `bytes` is the size of a cut blob."""

    def __init__(self, layout: Layout, experts: ExpertParts, top: int) -> None:
        self._whole = layout
        self.inner = inner_of(experts)
        self._cuts = {name: _cut_of(name, field.shape, experts) for name, field in layout.fields.items()}
        offset, found = 0, []
        for start, stop in ((0, top), (top, self.inner)):
            small = Layout.of({n: (f.dtype, self._small(n, f.shape, start, stop)) for n, f in layout.fields.items()})
            found.append(SegmentLayout(start, stop, offset, small))
            offset += small.bytes
        self.segments, self.bytes = tuple(found), offset

    def cut(self, blob: torch.Tensor) -> torch.Tensor:
        """Split one expert's blob into [top | bottom]: uint8 [bytes]."""
        out = torch.zeros(self.bytes, dtype=torch.uint8)
        for small, whole in self._pairs(out, blob):
            small.copy_(whole)
        return out

    def join(self, cut: torch.Tensor, blob: torch.Tensor) -> None:
        """Inverse of `cut`: writes the whole blob (uint8 [layout.bytes], zeros between its fields)."""
        blob.zero_()
        for small, whole in self._pairs(cut, blob):
            whole.copy_(small)

    def _pairs(self, cut: torch.Tensor, blob: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields, for every field of a segment, its view and the view of the same numbers in the whole blob."""
        for number, (start, stop, offset, layout) in enumerate(self.segments):
            for name, field in layout.fields.items():
                how = self._cuts[name]
                if not (number and how.once):
                    small = field.view(cut[offset : offset + layout.bytes])
                    yield (
                        (small if how.axis is None else small.unflatten(how.axis, (how.blocks, -1))),
                        _pick(self._whole.fields[name].view(blob), how, start, stop),
                    )

    def _small(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
        how = self._cuts[name]
        view = _pick(torch.empty(shape, device="meta"), how, start, stop)
        return tuple(view.shape if how.axis is None else view.flatten(how.axis, how.axis + 1).shape)


def inner_of(experts: ExpertParts) -> int:
    """Inner neurons of one expert: the input features of `down`."""
    spec = next(spec for name, spec in experts.parts.items() if name.startswith("down") and spec.is_weight)
    return spec.shape[0 if experts.is_transposed else 1]


def top_of(experts: ExpertParts, group: int, split: float) -> int:
    """Neurons of the top segment, nearest to the given share of all. `group` = inputs that share a scale, 0 = a whole
    row.

    Raises SettingError when the share is out of range, or the expert is too small to be split.
    """
    if not 0 < split < 1:
        raise SettingError(f"A split of {split:g} is no share between 0 and 1. 0.5 cuts every expert into halves.")
    inner, grain = inner_of(experts), max(group, GRAIN)
    if inner < 2 * grain:
        raise SettingError(
            f"Experts of {inner} inner neurons cannot be cut: a segment needs {grain}. Import without "
            "a split, or choose a format with smaller groups."
        )
    return min(max(round(inner * split / grain), 1), (inner - 1) // grain) * grain


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
