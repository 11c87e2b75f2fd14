"""Compile every kernel for given GPUs, without having one: `python -m core.memory.codec.kernels.check [80 89 90 ...]`.

Prints the shared memory and machine code size of each for a matrix of Qwen3-30B-A3B; compiler errors propagate. Needs
triton.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from core.memory.codec import FORMATS, PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.kernels.products import BY_IDS, LANES, Launch, SlotKernels

TARGETS = (80, 89, 90)
SHAPE = (1536, 2048)
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def variants(formats: Sequence[str], shape: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """All launches for a matrix [out, in] with a bias in each format, by name."""
    for name in formats:
        for transposed in (False, True) if FORMATS[name].is_plain else (False,):
            specs = {
                "down_proj": PartSpec(shape[::-1] if transposed else shape, dtype),
                "down_proj_bias": PartSpec(shape[:1], dtype),
            }
            codec = make_codec(name, specs=specs, dtype=dtype, device=torch.device("meta"), is_transposed=transposed)
            assert isinstance(codec, Base)
            kernels = SlotKernels(codec)
            for way, lanes in (("", LANES), (" by ids", BY_IDS)):
                what = f"{name} product{' transposed' if transposed else ''}{way}"
                yield what, kernels.product("down_proj", lanes)
            if not kernels.is_plain:
                yield f"{name} dequantizing", kernels.dequantization("down_proj", LANES)


def build(launch: Launch, dtype: torch.dtype, capability: int) -> Any:
    """The compiled kernel for NVIDIA's compute capability 10 * major + minor."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    constants = {name: value for name, value in launch.constants.items() if name in names}
    lanes = constants["LANES"]
    if "table" in names and not constants["TABLE"]:
        constants["table"] = None
    if "ids" in names and lanes != BY_IDS:
        constants["ids"] = None
    bases = "*i64" if lanes == BY_IDS else ("i64",) * lanes
    types = {"x": POINTERS[dtype], "out": POINTERS[dtype], "table": "*fp32", "bases": bases, "ids": "*i64"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = [
        (i, j)
        for i, name in enumerate(names)
        if name not in constants
        for j in (range(lanes) if name == "bases" and lanes != BY_IDS else (None,))
    ]
    source = ASTSource(
        launch.kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,) if j is None else (i, j): [["tt.divisibility", 16]] for i, j in places},
    )
    options = {name: value for name, value in launch.constants.items() if name not in names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(capabilities: Sequence[int]) -> None:
    """Print the table."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, launch in variants([f for f in FORMATS if FORMATS[f].is_loadable], SHAPE, dtype):
            for capability in capabilities:
                compiled = build(launch, dtype, capability)
                print(
                    f"{name:<32} {str(dtype)[6:]:<9} sm_{capability}  shared {compiled.metadata.shared:>6}  "
                    f"machine code {len(compiled.asm['cubin']):>6}",
                    flush=True,
                )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or TARGETS)
