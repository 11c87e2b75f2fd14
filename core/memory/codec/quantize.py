"""Rounds weights to codes; each group gets the scale (and zero) with the least squared error among a few candidates.

Candidates are clipped ranges, then the least-squares refit of the best one's codes. Scale and zero are rounded to the
blob's number types before the codes are chosen, so storing them costs no accuracy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from core.memory.codec.formats import Format, Numbers
from core.memory.codec.tables import grid

SMALLEST = 1e-7  # lower bound of a scale, also for a group of zeros
CHUNK = 1 << 18  # weights rounded at a time on a CPU: fits in its cache

# Candidates. Finer grids gain less than 1 % on normal and Student-t weights; at 2 bits clipping and refitting
# take the error of t4-distributed weights (relative, groups of 64) from .54 to .42, at 3 from .24 to .23.
CLIPS = {4: (1.0, 0.95, 0.9, 0.85), 3: (1.0, 0.9, 0.8, 0.7), 2: (1.0, 0.8, 0.6)}  # shares of a group's range
REFITS = {4: 1, 3: 2, 2: 2}
EXTREMES = {"": (-8.0, -8.4, -8.8, -9.2), "nf4": (1.0,), "iq4_nl": (-135.0, -127.0, -119.0, 113.0, 105.0)}
# ... values, in scales, given to a group's weight of largest magnitude; the scale takes that weight's sign


class QuantizedMatrix(NamedTuple):
    """Quantised matrix as blobs store it: codes [out, in] uint8 (8 bits: int8), scale and zero [out, groups] (row
    formats: scale [out])."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


def quantize(weight: torch.Tensor, format: Format, numbers: Numbers) -> QuantizedMatrix:
    """Round [out, in] fp32 to a format."""
    search = Search(weight.view(weight.shape[0], -1, format.group or weight.shape[1]), format, numbers)
    if format.table == "mxfp4":
        search.try_powers()
    elif format.bits == 8:
        search.attempt(search.grouped.abs().amax(-1, keepdim=True) / 127)
    elif format.zero:
        search.try_ranges()
    else:
        search.try_extremes()
    scale, zero = search.scale, search.zero
    stored = exponents(scale) if format.table == "mxfp4" else scale.to(numbers.scale)
    return QuantizedMatrix(
        search.codes().view_as(weight),
        stored[..., 0] if format.group else stored.view(-1),
        None if zero is None else zero[..., 0].to(numbers.zero),
    )


def exponents(powers: torch.Tensor) -> torch.Tensor:
    """Powers of two as their fp32 exponent bits, uint8."""
    return (powers.view(torch.int32) >> 23).to(torch.uint8)


class Search:
    """Best scale found so far for groups [out, groups, group] fp32; per-group results are [out, groups, 1] fp32."""

    def __init__(self, grouped: torch.Tensor, format: Format, numbers: Numbers) -> None:
        self.grouped, self.format, self.numbers = grouped, format, numbers
        self.half = 1 << format.bits - 1
        self.error = self.scale = torch.empty(0)
        self.zero: torch.Tensor | None = None

    def attempt(self, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
        """Round with these scales and zeros, and keep them for the groups whose error improves."""
        if self.format.table != "mxfp4":
            scale = torch.where(scale.abs() < SMALLEST, SMALLEST, scale).to(self.numbers.scale).float()
        if zero is not None:
            zero = zero.to(self.numbers.zero).float()
        levels = self._levels(scale, zero)
        missed = levels.mul_(scale).sub_(self.grouped)
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
            found = cells.cells(self._ratios(self.scale, None))
            return cells.codes.index_select(0, found.view(-1)).view_as(found)
        levels = self._levels(self.scale, self.zero)
        return levels.to(torch.int8) if self.format.bits == 8 else levels.add_(self.half).to(torch.uint8)

    def _ratios(self, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        return self.grouped / scale if zero is None else (self.grouped - zero).div_(scale)

    def _levels(self, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """The values, in units of the scale, that the weights round to."""
        ratios = self._ratios(scale, zero)
        if self.format.table:
            cells = grid(self.format.table, ratios.device)
            return cells.values.index_select(0, cells.cells(ratios).view(-1)).view_as(ratios)
        low = -127 if self.format.bits == 8 else -self.half
        return ratios.round_().clamp_(low, self.half - 1)

    def refit(self) -> None:
        """Try the least-squares scale (and zero) for the current codes."""
        levels = self._levels(self.scale, self.zero)
        if self.zero is None:
            self.attempt(
                (levels * self.grouped).sum(-1, keepdim=True)
                / levels.square().sum(-1, keepdim=True).clamp_(min=SMALLEST)
            )
            return
        middle, mean = levels.mean(-1, keepdim=True), self.grouped.mean(-1, keepdim=True)
        centred = levels - middle
        scale = (centred * self.grouped).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True).clamp_(min=1e-6)
        self.attempt(scale, mean - scale * middle)

    def try_ranges(self) -> None:
        """Try evenly spaced levels between the clipped ends of each group."""
        low, high = self.grouped.aminmax(dim=-1, keepdim=True)
        for clip in CLIPS[self.format.bits]:
            scale = (high - low) * (clip / (2 * self.half - 1))
            scale = scale.clamp_(min=SMALLEST).to(self.numbers.scale).float()
            self.attempt(scale, low * clip + self.half * scale)
        for _ in range(REFITS[self.format.bits]):
            self.refit()

    def try_extremes(self) -> None:
        """Try mapping the weight of largest magnitude to each of a few values."""
        extreme = self.grouped.gather(-1, self.grouped.abs().argmax(-1, keepdim=True))
        for value in EXTREMES[self.format.table]:
            self.attempt(extreme / value)
        self.refit()

    def try_powers(self) -> None:
        """Try the power of two that OCP's rule gives (the largest weight in E2M1's last binade), its half and its
        double."""
        largest = self.grouped.abs().amax(-1, keepdim=True).clamp_(min=2.0**-120)
        power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) / 4
        for factor in (1.0, 2.0, 0.5):
            self.attempt(power * factor)
