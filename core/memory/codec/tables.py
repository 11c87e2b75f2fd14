"""Code values of formats of 2 to 4 bits that are not evenly spaced around zero, before the group's scale.

nf4: quantiles of a normal distribution, scaled to [-1, 1]; QLoRA (Dettmers et al. 2023), appendix E. mxfp4: E2M1, a
sign bit, two exponent bits and one of mantissa; OCP Microscaling Formats 1.0, section 5.3.3. iq4_nl: GGML's
kvalues_iq4nl (llama.cpp, ggml-common.h).

iq3_xxs, iq3_s, iq2: the magnitudes that the grids of GGML's i-quants are made of, and above them the same negative, so
that what a file says by a number of the grid and by signs is a code for each weight. iq1_s, iq1_m: -1, 0 and 1, all
moved by an eighth; of iq1_m, in either direction. Files do not use the last values: of iq2 one of each sign, of
iq1_s one, of iq1_m those of the codes 3 and 7. They are Moestro's, for rounding.
"""

import functools
from typing import NamedTuple

import torch

_IQ3 = 1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0
_IQ2 = 1.0, 3.125, 5.375, 7.625
_IQ1 = -0.875, 0.125, 1.125
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "mxfp4": (*_E2M1, *(-v for v in _E2M1)),
    "iq4_nl": (
        -127.0,
        -104.0,
        -83.0,
        -65.0,
        -49.0,
        -35.0,
        -22.0,
        -10.0,
        1.0,
        13.0,
        25.0,
        38.0,
        53.0,
        69.0,
        89.0,
        113.0,
    ),
    "iq3_xxs": (*_IQ3, 15.5, *(-v for v in _IQ3), -15.5),
    "iq3_s": (*_IQ3, 15.0, *(-v for v in _IQ3), -15.0),
    "iq2": (*_IQ2, *(-v for v in _IQ2)),
    "iq1_s": (*_IQ1, 2.125),
    "iq1_m": (*_IQ1, 0.5, *(-v for v in reversed(_IQ1)), -0.5),
}
UNITS = {
    "mxfp4": 2.0,
    "iq4_nl": 1.0,
    "nf4": 127.0,
    "iq3_xxs": 2.0,
    "iq3_s": 1.0,
    "iq2": 8.0,
    "iq1_s": 8.0,
    "iq1_m": 8.0,
}
"""The integer that stands for 1.0 where values are multiplied as integers; those of nf4 are rounded to it."""
CELLS = {"nf4": 8192} | {name: int(2 * unit) for name, unit in UNITS.items() if name != "nf4"}
"""Cells per unit of a Grid."""


@functools.cache
def table(name: str, device: torch.device) -> torch.Tensor:
    """The values by code, fp32 [2 ** bits]."""
    with torch.inference_mode(False):
        return torch.tensor(TABLES[name], dtype=torch.float32, device=device)


class Grid(NamedTuple):
    """The table divided into cells of equal width, for fast rounding: each cell has the value (fp32) and code (uint8)
    nearest to its middle."""

    low: float  # left end of the first cell
    per_unit: float  # cells per unit
    values: torch.Tensor
    codes: torch.Tensor

    def cells(self, ratios: torch.Tensor) -> torch.Tensor:
        """The cell of each ratio (weight / scale), int32; ratios outside the grid are clamped to the first or last
        cell."""
        return (ratios - self.low).mul_(self.per_unit).to(torch.int32).clamp_(0, self.values.numel() - 1)


@functools.cache
def grid(name: str, device: torch.device) -> Grid:
    """A grid fine enough that no cell contains a boundary between neighbouring values; for nf4, boundaries 1 / 16384
    apart excepted."""
    entries = torch.tensor(TABLES[name], dtype=torch.float64)
    per_unit = CELLS[name]
    low, count = float(entries.min()), int((entries.max() - entries.min()) * per_unit)
    middles = low + (torch.arange(count) + 0.5) / per_unit
    codes = (middles[:, None] - entries).abs().argmin(1)
    with torch.inference_mode(False):
        return Grid(low, per_unit, table(name, device)[codes.to(device)], codes.to(device, torch.uint8))
