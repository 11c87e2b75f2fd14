"""Rounds weights to codes; each group gets the scale (and zero) with the least squared error among a few candidates.

A candidate's codes determine the scale (and zero) that fit them best, and the error of these: no second look at the
weights is needed. The best fit is fitted again to its own codes, and kept where its error, with scale and zero rounded
to the blob's number types, is below that of the plain rule: the group's ends, or its extreme, to the ends of the codes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from core.memory.codec.formats import Format, Numbers
from core.memory.codec.tables import TABLES, grid

SMALLEST = 1e-7  # lower bound of a scale, also for a group of zeros
CHUNK = 1 << 18  # weights rounded at a time on a CPU: fits in its cache

# Candidates. Normal weights' squared errors are within 5 % of the best that 18 x 18 pairs of ends or 120 extremes find;
# ends that are clipped alike leave 4 to 10 % more.
ENDS = {5: (1.0, 0.97), 4: (1.0, 0.93), 3: (0.95, 0.8), 2: (0.85, 0.6)}
"""Shares of the distance from a group's mean to its lowest and to its highest weight; each pair of them is tried."""
REFITS = {5: 1, 4: 1, 3: 1, 2: 2}
EXTREMES = {
    "": (-8.2, -7.2, -7.7, -8.7, -9.2),
    "nf4": (1.0, -1.0, 1.1),
    "iq4_nl": (-130.0, 117.0, -122.0, -138.0, -107.0),
    "mxfp4": (6.0, 4.0, 6.6, 4.4, 5.2),
    "iq3_xxs": (16.0, 14.0, 15.0, 17.0, 18.0),
    "iq3_s": (15.5, 13.5, 14.5, 16.5, 17.5),
    "iq2": (7.8, 6.6, 7.2, 8.5, 9.3),
    "iq1_s": (2.2, 1.6, 1.9, -1.0, -1.3),
    "iq1_m": (1.2, 1.0, 1.35, 1.6, 1.9),
}
"""Values, in scales, given to a group's weight of largest magnitude; the scale takes that weight's sign, but for one of
8 bits. Evenly spaced ones are those of 4 bits. One refit."""
LARGEST_SCALE, LEAST_SCALE = 448.0, 2.0**-9  # of e4m3
MOST = 127  # of integers as scales and zeros
ROOM = 1.2  # the largest scale that is tried, in those that the plain rule gives


class QuantizedMatrix(NamedTuple):
    """Quantised matrix as blobs store it: codes [out, in] uint8 (8 bits: int8), scale and zero [out, groups] (row
    formats: scale [out]), and scales of rows, or what integers of `wide` weights are multiplied by."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    row: torch.Tensor | None  # [out, 1] fp32, or [out, wides (x 2)] fp16


class Fit(NamedTuple):
    """Scale and zero of least squares for some codes, [out, groups, 1] each, and by how much they reduce the squared
    error of a group; the zero is counted from the group's mean."""

    gain: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


def quantize(weight: torch.Tensor, format: Format, numbers: Numbers) -> QuantizedMatrix:
    """Round [out, in] fp32 to a format."""
    search = Search(weight.view(weight.shape[0], -1, format.group or weight.shape[1]), format, numbers)
    if format.scale == "e8m0":
        search.try_powers()
    elif format.bits == 8:
        search.attempt(search.grouped.abs().amax(-1, keepdim=True) / 127)
    elif format.zero:
        search.try_ranges()
    else:
        search.try_extremes()
    scale, zero = search.scale, search.zero
    stored = exponents(scale) if format.scale == "e8m0" else search.coded_scale(scale)
    return QuantizedMatrix(
        search.codes().view_as(weight),
        stored[..., 0] if format.group else stored.view(-1),
        None if zero is None else search.coded_zero(zero)[..., 0],
        search.wide if search.wide is not None else None if search.row is None else search.row[..., 0],
    )


def exponents(powers: torch.Tensor) -> torch.Tensor:
    """Powers of two as their fp32 exponent bits, uint8."""
    return (powers.view(torch.int32) >> 23).to(torch.uint8)


class Search:
    """Best scale found so far for groups [out, groups, group] fp32; per-group results are [out, groups, 1] fp32."""

    def __init__(self, grouped: torch.Tensor, format: Format, numbers: Numbers) -> None:
        self.grouped, self.format, self.numbers = grouped, format, numbers
        self.offset, self.levels = format.offset, 1 << format.bits
        self.error = self.scale = torch.empty(0)
        self.zero: torch.Tensor | None = None
        self._ratios = torch.empty_like(grouped)  # of each try in turn
        self.row: torch.Tensor | None = None  # [out, 1, 1]: a row's largest scale becomes the largest of its type
        if format.has_row_scale:
            most = max(TABLES[format.table]) * LARGEST_SCALE
            self.row = (grouped.abs().amax((1, 2), keepdim=True) / most).clamp_(min=SMALLEST)
        self.wide: torch.Tensor | None = None  # [out, wides (x 2)] fp16
        self.units: tuple[torch.Tensor | None, torch.Tensor | None] = (
            self.row,
            None,
        )  # what integer scales and zeros are multiplied by
        if format.wide:
            self.wide, self.units = self._wide()

    def _wide(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]:
        """What integers are multiplied by, the largest of `wide` weights being MOST: as stored, and for each group."""
        low, high = self.grouped.aminmax(dim=-1)
        if self.format.zero:
            largest = [(high - low) / (self.levels - 1), low.abs()]
        else:
            end = max(map(abs, TABLES[self.format.table])) if self.format.table else self.offset
            largest = [torch.maximum(-low, high) * (ROOM / end)]
        groups = self.format.wide // self.format.group
        wide = torch.stack([one.unflatten(-1, (-1, groups)).amax(-1) for one in largest], -1)
        stored = (wide / MOST * (1 + 2.0**-10)).clamp_(2.0**-24, torch.finfo(torch.float16).max).half()
        scale, *zero = stored.float().repeat_interleave(groups, 1).split(1, -1)
        return stored.flatten(1), (scale, zero[0] if zero else None)

    def attempt(self, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
        """Round with these scales and zeros as they are stored, and keep them for the groups whose error improves."""
        if self.format.scale != "e8m0":
            scale = self._stored(scale)
        if zero is not None:
            zero = self._stored_zero(zero)
        missed = self._levels(self.grouped, scale, zero).mul_(scale).sub_(self.grouped)
        if zero is not None:
            missed += zero
        error = missed.square_().sum(-1, keepdim=True)
        if not self.error.numel():
            self.error, self.scale, self.zero = error, scale, zero
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if zero is not None and self.zero is not None:
            self.zero = torch.where(better, zero, self.zero)

    def codes(self) -> torch.Tensor:
        """The groups' codes with the best scales: uint8, or int8 for 8 bits."""
        if self.format.table:
            cells = grid(self.format.table, self.grouped.device)
            found = cells.cells(self.grouped / self.scale)
            return cells.codes.index_select(0, found.view(-1)).view_as(found)
        levels = self._levels(self.grouped, self.scale, self.zero)
        return levels.to(torch.int8) if self.format.bits == 8 else levels.add_(self.offset).to(torch.uint8)

    def try_ranges(self) -> None:
        """Try evenly spaced levels between the ends of each group, and between clipped ends."""
        low, high = self.grouped.aminmax(dim=-1, keepdim=True)
        steps = self.levels - 1
        scale = self._stored((high - low) / steps)
        self.attempt(scale, low + self.offset * scale)
        mean = self.grouped.mean(-1, keepdim=True)
        below, above, shares = low - mean, high - mean, ENDS[self.format.bits]

        def clipped() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for lower in shares:
                for upper in shares:
                    step = ((above * upper - below * lower) / steps).clamp_(min=SMALLEST)
                    yield step, below * lower + self.offset * step

        best = self._best_fit(self.grouped - mean, clipped(), REFITS[self.format.bits])
        assert best.zero is not None
        self.attempt(best.scale, best.zero + mean)

    def try_extremes(self) -> None:
        """Try mapping the weight of largest magnitude to each of a few values."""
        low, high = self.grouped.aminmax(dim=-1, keepdim=True)
        extreme = torch.where(-low > high, low, high)
        if self.row is not None:
            extreme = extreme.abs()
        self.attempt(extreme / (max(TABLES[self.format.table], key=abs) if self.format.table else -self.offset))
        wider = 1 if self.format.table else self.offset / 8
        tried = ((self._bounded(extreme / (value * wider)), None) for value in EXTREMES[self.format.table])
        self.attempt(self._best_fit(self.grouped, tried, 1).scale)

    def try_powers(self) -> None:
        """Try the power of two that OCP's rule gives (the largest weight in E2M1's last binade), its half and its
        double."""
        largest = self.grouped.abs().amax(-1, keepdim=True).clamp_(min=2.0**-120)
        power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) / 4
        for factor in (1.0, 2.0, 0.5):
            self.attempt(power * factor)

    def _best_fit(
        self, values: torch.Tensor, tried: Iterator[tuple[torch.Tensor, torch.Tensor | None]], refits: int
    ) -> Fit:
        """The fit of the largest gain to the codes that some scales and zeros give, refitted to its own."""
        products = torch.empty_like(values)
        best = self._fit(values, *next(tried), products)
        for scale, zero in tried:
            best = _better(best, self._fit(values, scale, zero, products))
        for _ in range(refits):
            best = _better(best, self._fit(values, self._bounded(best.scale), best.zero, products))
        return best

    def _fit(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, products: torch.Tensor) -> Fit:
        """The best fit to the codes of `values`, whose mean is 0 where there is a zero; `products` is overwritten."""
        levels = self._levels(values, scale, zero)
        product = torch.mul(levels, values, out=products).sum(-1, keepdim=True)
        middle = levels.mean(-1, keepdim=True) if zero is not None else None
        squares = levels.square_().sum(-1, keepdim=True)
        if middle is not None:
            squares -= middle.square() * levels.shape[-1]
        fitted = product / squares.clamp_(min=SMALLEST)
        return Fit(product * fitted, fitted, None if middle is None else -fitted * middle)

    def _levels(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """What values round to, in units of the scale."""
        ratios = self._ratios
        if zero is None:
            torch.div(values, scale, out=ratios)
        else:
            torch.sub(values, zero, out=ratios).div_(scale)
        if self.format.table:
            cells = grid(self.format.table, ratios.device)
            return cells.values.index_select(0, cells.cells(ratios).view(-1)).view_as(ratios)
        low = -127 if self.format.bits == 8 else -self.offset
        return ratios.round_().clamp_(low, 127 if self.format.bits == 8 else self.levels - 1 - self.offset)

    def _bounded(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.where(scale.abs() < SMALLEST, SMALLEST, scale)

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale as the blob stores it."""
        if self.units[0] is not None:
            return self.coded_scale(scale).float() * self.units[0]
        return self.coded_scale(self._bounded(scale)).float()

    def _stored_zero(self, zero: torch.Tensor) -> torch.Tensor:
        """A zero as the blob stores it."""
        coded = self.coded_zero(zero).float()
        return coded if self.units[1] is None else coded * self.units[1]

    def coded_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale in the blob's number type."""
        if self.row is not None:
            scale = (scale / self.row).clamp_(LEAST_SCALE, LARGEST_SCALE)
        elif self.units[0] is not None:
            scale = (scale / self.units[0]).round_().clamp_(-MOST, MOST)
            scale = torch.where(scale == 0, 1.0, scale)
        return scale.to(self.numbers.scale)

    def coded_zero(self, zero: torch.Tensor) -> torch.Tensor:
        """A zero in the blob's number type."""
        if self.units[1] is not None:
            zero = (zero / self.units[1]).round_().clamp_(-MOST, MOST)
        return zero.to(self.numbers.zero)


def _better(one: Fit, other: Fit) -> Fit:
    """Group by group, the one of the larger gain."""
    better = other.gain > one.gain
    zero = None if one.zero is None or other.zero is None else torch.where(better, other.zero, one.zero)
    return Fit(torch.where(better, other.gain, one.gain), torch.where(better, other.scale, one.scale), zero)
