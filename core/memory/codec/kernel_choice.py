"""Tries on this machine which way of computing a codec's products is the fastest for how many rows."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.memory.codec.base import Codec, LinearWay, SlotParts
from core.memory.codec.native import choice
from core.memory.codec.native.threads import WORTH_IT, share, shared_by
from core.system.native.openmp import entry


def kind(codec: Codec, part: str) -> str:
    """What products that take the same time have in common."""
    outputs, inputs = codec.out_in(part)
    return f"{codec.name} {outputs} x {inputs} {str(codec.dtype).removeprefix('torch.')}"


@torch.inference_mode()
def choose(codec: Codec, least: int = WORTH_IT) -> None:
    """Have `linear` take the fastest way from now on: as kept of earlier loads, or timed now. Of matrices of fewer than
    `least` bytes any way is fast enough."""
    threads = torch.get_num_threads()
    for part in codec.weights:
        outputs, inputs = codec.out_in(part)
        bits = codec.format.bits or 8 * codec.dtype.itemsize
        ways = codec.ways(part) if outputs * inputs * bits // 8 >= least else {}
        if len(ways) > 1:
            slot = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
            parts, x = codec.views(slot), torch.ones(choice.ROWS[-1], inputs, dtype=codec.dtype)
            with _one_thread():
                choice.choose(
                    kind(codec, part),
                    {name: functools.partial(_product, way, parts, x) for name, way in ways.items()},
                    threads,
                    share=1 if entry() else threads,
                )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products are computed by the calling thread alone: several threads would wait for whatever else runs here."""
    before, shared = torch.get_num_threads(), shared_by()
    torch.set_num_threads(1)
    share(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        share(shared)


def _product(way: LinearWay, parts: SlotParts, x: torch.Tensor, rows: int) -> torch.Tensor:
    return way(parts, x[:rows])
