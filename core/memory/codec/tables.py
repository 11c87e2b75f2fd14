"""The values that 4-bit codes stand for in formats that do not space them evenly, before the group's scale.

nf4: quantiles of a normal distribution, scaled to [-1, 1]; QLoRA (Dettmers et al. 2023), appendix E.
mxfp4: E2M1, a sign bit, two exponent bits and one of mantissa; OCP Microscaling Formats 1.0, section 5.3.3.
iq4_nl: GGML's kvalues_iq4nl (llama.cpp, ggml-common.h).
"""

from __future__ import annotations

import functools

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "mxfp4": (*_E2M1, *(-v for v in _E2M1)),
    "iq4_nl": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
}


@functools.cache
def table(name: str, device: torch.device) -> torch.Tensor:
    """The 16 values by code, fp32 [16]."""
    with torch.inference_mode(False):
        return torch.tensor(TABLES[name], dtype=torch.float32, device=device)


@functools.cache
def _nearest(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Borders between neighbouring values, ascending [15], and the code of the value below each, and the last [16]."""
    values, codes = torch.tensor(TABLES[name], dtype=torch.float32, device=device).sort(stable=True)
    return (values[1:] + values[:-1]) / 2, codes.to(torch.uint8)


def nearest(name: str, ratios: torch.Tensor) -> torch.Tensor:
    """The code of the value nearest to each ratio (weight / scale), uint8."""
    borders, codes = _nearest(name, ratios.device)
    return codes[torch.bucketize(ratios, borders, out_int32=True)]
