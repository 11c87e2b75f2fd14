"""Launches of the kernels that compute attention of one decoded token, and their first trial."""

import logging
import math
from typing import NamedTuple

import torch

from core.memory.codec import kernels

log = logging.getLogger("moestro.kernels")

CHUNK, PARTS = 128, 16  # positions of a part; parts joined at once
POSITIONS = {2: 64, 4: 16}  # computed at once, by bytes of a number: so that a tile fits into any GPU's shared memory
ROWS = 16  # at least, of a tile of tensor cores
NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
TRIED = (2 * CHUNK, 3 * CHUNK + 1)  # positions: the compiler tells multiples of 16 from other numbers
CLOSE = 1e-5  # relative error in a trial, of the result's norm; or 4 units of the number type


class Shape(NamedTuple):
    """What kernels are compiled for."""

    heads: int
    shared: int  # heads of keys and values
    width: int
    values: int  # width of values
    dtype: torch.dtype
    scaling: float


class AttentionKernels:
    """Attention of one token over keys and values of one shape."""

    def __init__(self, shape: Shape, launcher: kernels.Launcher) -> None:
        """Raises ImportError, and what the launcher raises."""
        from core.hf.attention_kernels import attend_part, join_parts

        self._shape, sharing = shape, shape.heads // shape.shared
        values = {"VALUES": shape.values, "BV": covering(shape.values), "CHUNK": CHUNK, "enable_fp_fusion": True}
        self._part = launcher(
            attend_part,
            values
            | {
                "SHARING": sharing,
                "WIDTH": shape.width,
                "ROWS": max(ROWS, covering(sharing)),
                "BW": covering(shape.width),
                "BN": POSITIONS[shape.dtype.itemsize],
                "FACTOR": shape.scaling * math.log2(math.e),
                "num_warps": 4,
                "num_stages": 2,
            },
        )
        self._join = launcher(join_parts, values | {"BP": PARTS, "num_warps": 4})

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """q [1, heads, 1, width], k [1, shared, n, width], v [1, shared, n, values] -> [1, 1, heads, values]. All n
        positions, or those up to `last` [1] int64, which is on the device. Two launches, which wait for nothing."""
        heads, values, count = self._shape.heads, self._shape.values, k.shape[2]
        parts = -(-count // CHUNK)
        room = torch.empty(heads * parts * (values + 2), dtype=torch.float32, device=q.device)
        sums, scales = room[2 * heads * parts :], room[: 2 * heads * parts]
        out = torch.empty(1, 1, heads, values, dtype=q.dtype, device=q.device)
        strides = q.stride(1), k.stride(1), k.stride(2), v.stride(1), v.stride(2)
        self._part[self._shape.shared, parts](q, k, v, sums, scales, last, count, parts, *strides)
        self._join[heads, 1](sums, scales, out, last, count, parts)
        return out


def covering(count: int) -> int:
    """The next power of two, of at least 16, which is the least that tensor cores multiply."""
    return max(16, 1 << (count - 1).bit_length())


@torch.inference_mode()
def tried(shape: Shape, device: torch.device) -> AttentionKernels | None:
    """Kernels for this shape, if they are as close to exact attention as rounding allows, with the number of positions
    on the host and on the device; None otherwise."""
    if shape.dtype not in NUMBERS:
        return None
    random, dtype = torch.Generator().manual_seed(0), shape.dtype
    try:
        made = AttentionKernels(shape, kernels.launcher_of(device))
        for count in TRIED:
            drawn = (
                (shape.heads, 1, shape.width),
                (shape.shared, count, shape.width),
                (shape.shared, count, shape.values),
            )
            q, k, v = (torch.randn(1, *size, generator=random).to(device, dtype) for size in drawn)
            for last in (count - 1, count // 2):
                want = exact(q, k[:, :, : last + 1], v[:, :, : last + 1], shape.scaling)
                found = [made(q, k, v, torch.tensor([last], device=device))]
                if last == count - 1:
                    found.append(made(q, k, v, None))
                off = max(float((one[0, 0].float() - want).norm() / want.norm()) for one in found)
                if not off <= max(CLOSE, 4 * torch.finfo(dtype).eps):
                    raise ArithmeticError(f"{off:.2%} off with {last + 1} positions")
                if not torch.equal(found[0], found[-1]):
                    raise ArithmeticError(f"other bits where the device alone knows of {last + 1} positions")
    except Exception as error:  # a GPU's compiler can raise anything
        log.info("Attention of decoded tokens is left to torch: %s: %s", type(error).__name__, error)
        return None
    return made


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """[heads, values] fp32 of one token, by the formula, in fp64 on the CPU."""
    one, keys, values = (x[0].double().cpu() for x in (q, k, v))
    times = one.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(times, 0), values.repeat_interleave(times, 0)
    return ((one @ keys.transpose(1, 2) * scaling).softmax(-1) @ values)[:, 0].float().to(q.device)
