"""Runs a checkpoint conversion on codes, scales and zeros instead of on weights.

Converting checkpoint tensors to a model's expert only changes the layout: stack, concatenate, transpose. Applied to
codes, scales and zeros separately it gives the same expert as codes, unless it cuts across groups. That is tested once
per shape.
"""

from collections.abc import Callable, Hashable, Mapping

import torch

from core.memory.codec.coded import QuantizedTensor, alike
from core.memory.codec.formats import format_of

Planes = dict[str, torch.Tensor]


class Merger:
    """Merges the coded ingredients of an expert's part. Caches the shapes for which that works. Thread-safe."""

    def __init__(self) -> None:
        self._works: dict[Hashable, bool] = {}

    def merge(
        self, parts: Mapping[str, QuantizedTensor], convert: Callable[[Planes], torch.Tensor], kind: Hashable
    ) -> QuantizedTensor | None:
        """Merge `parts`, as stored, by `convert`; None where they are coded differently or cannot be merged as codes.

        `kind` is the cache key: equal for conversions that behave alike.
        """
        codes = alike([*parts.values()])
        if not codes or len({c.zero is None for c in codes}) > 1:
            return None
        first, parts = codes[0], dict(zip(parts, codes, strict=True))
        known = (kind, *((c.format, c.codes.shape, c.scale.shape) for c in parts.values()))
        if known not in self._works:
            self._works[known] = _works(parts, convert)
        if not self._works[known]:
            return None
        zeros = {p: c.zero for p, c in parts.items() if c.zero is not None}
        rows = {p: c.row for p, c in parts.items() if c.row is not None}
        return QuantizedTensor(
            first.format,
            convert({p: c.codes for p, c in parts.items()}),
            convert({p: c.scale for p, c in parts.items()}),
            convert(zeros) if zeros else None,
            convert(rows) if rows else None,
        )


def _works(parts: Mapping[str, QuantizedTensor], convert: Callable[[Planes], torch.Tensor]) -> bool:
    """Test whether each code keeps its own group, of the format's size, by converting numbered groups."""
    format = format_of(next(iter(parts.values())).format)
    rows = {p: c.row for p, c in parts.items() if c.row is not None}
    if format.wide and format.zero:  # numbers that follow each other stay together where all blocks of codes do
        rows = {p: row[..., ::2] for p, row in rows.items()}
    try:
        return _keep(parts, {p: c.scale for p, c in parts.items()}, convert, format.group) and (
            not rows or _keep(parts, rows, convert, format.wide)
        )
    except (RuntimeError, ValueError, IndexError):  # scales have too few dimensions for the operation
        return False


def _keep(
    parts: Mapping[str, QuantizedTensor], scales: Planes, convert: Callable[[Planes], torch.Tensor], group: int
) -> bool:
    """Whether each code keeps the one of these scales that is its own. `group` = codes of each; 0: those of a row."""
    numbers = {p: torch.arange(s.numel(), dtype=torch.int32).view(s.shape) for p, s in scales.items()}
    groups = convert(dict(numbers))
    wanted = convert({p: spread(n, parts[p].codes.shape) for p, n in numbers.items()})
    split = [part for part, whole in zip(groups.shape, wanted.shape, strict=True) if part != whole]
    return torch.equal(spread(groups, wanted.shape), wanted) and (
        wanted.numel() == groups.numel() * group if group else split == [1]
    )


def spread(groups: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Expand one number per group to one per weight. Raises ValueError when `shape` does not
    consist of whole groups."""
    if groups.dim() != len(shape) or any(whole % part for whole, part in zip(shape, groups.shape, strict=True)):
        raise ValueError(f"{tuple(groups.shape)} are not the groups of {tuple(shape)}")
    for dim, whole in enumerate(shape):
        if groups.shape[dim] != whole:
            groups = groups.repeat_interleave(whole // groups.shape[dim], dim)
    return groups
