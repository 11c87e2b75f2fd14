"""Compile every kernel for given GPUs, without having one: `python -m core.memory.codec.kernels.check [80 89 90 ...]`.

Prints the shared memory and machine code size of each for a matrix of Qwen3-30B-A3B; compiler errors propagate. Needs
triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from core.memory.codec import FORMATS, PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.kernels.build import compiled, kinds_of
from core.memory.codec.kernels.products import SlotKernels

TARGETS = (80, 89, 90)
SHAPE = (1536, 2048)
META = torch.device("meta")


class Compiler:
    """A launcher that compiles what would be launched: `made` holds it."""

    def __init__(self, capability: int) -> None:
        """For NVIDIA's compute capability 10 * major + minor."""
        self._capability, self.made = capability, list[Any]()

    def __call__(self, kernel: Any, constants: Mapping[str, Any]) -> _Compiling:
        return _Compiling(
            lambda *given: self.made.append(compiled(kernel, constants, kinds_of(given), self._capability))
        )


class _Compiling:
    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        return self._call


def variants(
    formats: Sequence[str], shape: tuple[int, int], dtype: torch.dtype, capability: int
) -> Iterator[tuple[str, Any]]:
    """All kernels for a matrix [out, in] with a bias in each format, compiled, by name."""
    for name in formats:
        for transposed in (False, True) if FORMATS[name].is_plain else (False,):
            specs = {
                "down_proj": PartSpec(shape[::-1] if transposed else shape, dtype),
                "down_proj_bias": PartSpec(shape[:1], dtype),
            }
            codec = make_codec(name, specs=specs, dtype=dtype, device=META, is_transposed=transposed)
            assert isinstance(codec, Base)
            compiler = Compiler(capability)
            kernels = SlotKernels(codec, compiler)
            slots = [torch.empty(codec.slot_bytes, dtype=torch.uint8, device=META)]
            x = torch.empty(1, shape[1], dtype=dtype, device=META)
            what = f"{name} product{' transposed' if transposed else ''}"
            kernels.multiply("down_proj", slots, x)
            yield what, compiler.made.pop()
            ids = torch.empty(1, dtype=torch.int64, device=META)
            kernels.multiply_by_ids("down_proj", ids, ids, x)
            yield f"{what} by ids", compiler.made.pop()
            if not kernels.is_plain:
                list(kernels.dequantized("down_proj", slots))
                yield f"{name} dequantizing", compiler.made.pop()


def main(capabilities: Sequence[int]) -> None:
    """Print the table."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for capability in capabilities:
            for name, made in variants([f for f in FORMATS if FORMATS[f].is_loadable], SHAPE, dtype, capability):
                print(
                    f"{name:<32} {str(dtype)[6:]:<9} sm_{capability}  shared {made.metadata.shared:>6}  "
                    f"machine code {len(made.asm['cubin']):>6}",
                    flush=True,
                )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or TARGETS)
