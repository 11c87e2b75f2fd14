"""Compiles what a decoder layer computes beside its experts, as `core.runtime.program.gpu.check` does with these. Needs
triton.

Shapes are those of Qwen3-30B-A3B, with what other models have more: 32 heads of 128 numbers that read 4, states of
2048 numbers, 8 of 128 experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from core.memory.codec import PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.fast.gpu.dense import TILED, DenseKernels, DenseProducts, Placed
from core.memory.codec.fast.gpu.launch import SINCE
from core.memory.codec.kernels.build import compiled
from core.memory.codec.kernels.products import Launcher
from core.memory.codec.matrix import Matrix, matrix
from core.runtime.program.absorb import Absorb
from core.runtime.program.attend_block import Attend
from core.runtime.program.choose import Groups
from core.runtime.program.convolve import Convolve
from core.runtime.program.delta_inputs import DeltaInputs
from core.runtime.program.delta_rule import DeltaRule
from core.runtime.program.gate import Gate
from core.runtime.program.gated_heads import GatedHeads
from core.runtime.program.gpu.delta_kernels import DeltaKernels, Gates
from core.runtime.program.gpu.latent_kernels import Kept, LatentKernels
from core.runtime.program.gpu.layer import Cached, LayerKernels
from core.runtime.program.gpu.recorder import META, Recorder, meta
from core.runtime.program.latent import Latent
from core.runtime.program.rms import Norm
from core.runtime.program.rotate import Rotate
from core.runtime.program.route import Route

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, HEADS, KV_HEADS, WIDTH, CONTEXT = 2048, 32, 4, 128, 8192
CACHED = Cached(1 << 40, 1 << 41, CONTEXT * WIDTH * 2, WIDTH * 2, CONTEXT * WIDTH * 2, WIDTH * 2)
DELTA = DeltaRule(16, 128, 32, 128)  # of Qwen3-Next
LATENT, TURNED = 512, 64  # of DeepSeek's attention
ABSORBED = "checkpoint", "int8-g32", "int4-g64"
PREPARE = "_prepare"


def _norm(kernels: LayerKernels) -> None:
    x = meta(FP32, 1, HIDDEN)
    kernels.norm(Norm(HIDDEN, 1e-6, BF16), meta(BF16, HIDDEN), x, x, x)


def _takers() -> tuple[Any, ...]:
    """Forms that take a row rounded: experts in a format."""
    return _product("int4-g64", 1, launcher=Recorder()).takers


def _prepared(kernels: LayerKernels) -> None:
    x = meta(FP32, 1, HIDDEN)
    kernels.norm(Norm(HIDDEN, 1e-6, BF16), meta(BF16, HIDDEN), x, x, x, takers=_takers())


def _output(name: str, kernels: LayerKernels) -> None:
    """The product behind attention, with the norm behind it, by dense weights, and what experts in a format take."""
    x, norm = meta(FP32, 1, HIDDEN), Norm(HIDDEN, 1e-6, BF16)
    product = _product(name, HIDDEN, inputs=HEADS * WIDTH, launcher=kernels.launcher)
    end, _ = kernels.then_norm(norm, meta(BF16, HIDDEN), x, x, 1.0, _takers())
    product(meta(FP32, 1, HEADS * WIDTH), end=end)


def _router(kernels: LayerKernels) -> None:
    end, *_ = kernels.then_route(Route(128, 8, renormalised=True), None, None, META)
    _product("checkpoint", 128, launcher=kernels.launcher)(meta(FP32, 1, HIDDEN), end=end)


def _rotate(kernels: LayerKernels) -> None:
    spec = Rotate(HEADS, KV_HEADS, WIDTH, WIDTH, BF16, Norm(WIDTH, 1e-6, BF16), BF16)
    outputs = (HEADS + 2 * KV_HEADS) * WIDTH
    weight, angles = meta(BF16, WIDTH), meta(FP32, CONTEXT, WIDTH // 2)
    states, positions = (meta(FP32, 1, outputs), meta(FP32, 1, HEADS * WIDTH)), meta(torch.int64, 1)
    bias = meta(BF16, outputs)
    kernels.rotate(spec, states[0], bias, (weight, weight), (angles, angles), positions, states[1], CACHED)


def _attend(kernels: LayerKernels) -> None:
    spec = Attend(HEADS, KV_HEADS, WIDTH, WIDTH, BF16, WIDTH**-0.5, sinks=True)
    q, positions = meta(FP32, 1, HEADS, WIDTH), meta(torch.int64, 1)
    kernels.attend(spec, q, CACHED, positions, meta(FP32, HEADS), q, CONTEXT)


def _route(kernels: LayerKernels) -> None:
    kernels.route(Route(128, 8, renormalised=True), meta(FP32, 1, 128), None)


def _activate(kernels: LayerKernels) -> None:
    kernels.activate(Gate(768), meta(FP32, 1, 1536))


def _groups(kernels: LayerKernels) -> None:
    rule = Route(256, 8, "sigmoid", True, True, 1e-20, 2.5, groups=Groups(8, 32, 4))
    kernels.route(rule, meta(FP32, 1, 256), meta(FP32, 256))


def _gated(kernels: LayerKernels) -> None:
    spec, x = GatedHeads(HEADS, WIDTH, "silu", Norm(WIDTH, 1e-6, BF16)), meta(FP32, 1, HEADS * WIDTH)
    kernels.gate(spec, x, x, meta(torch.int64, HEADS), meta(BF16, WIDTH))


def _cap(kernels: LayerKernels) -> None:
    kernels.cap(meta(FP32, 1, HIDDEN), 30.0)


def _convolve(kernels: LayerKernels) -> None:
    spec = Convolve(DELTA.channels, WIDTH, 4, BF16, BF16)
    x, columns, weight = meta(FP32, 1, DELTA.channels), meta(torch.int64, spec.units), meta(BF16, 4, spec.channels)
    delta = DeltaKernels(kernels)
    delta.convolve(spec, x, columns, weight, None, 1 << 40, x)
    delta.keep(spec, x, columns, 1 << 40, 1)


def _delta(kernels: LayerKernels) -> None:
    heads, delta = meta(torch.int64, DELTA.value_heads), DeltaKernels(kernels)
    mixed, given = meta(FP32, 1, DELTA.channels), meta(FP32, 1, DELTA.channels)
    keys = DELTA.key_heads, DELTA.key_width
    spec = DeltaInputs(*keys, DELTA.value_heads, DELTA.channels, FP32, BF16, 1e-6)
    gates = Gates(heads, heads, meta(FP32, DELTA.value_heads), meta(BF16, DELTA.value_heads))
    taken = delta.inputs(spec, mixed, given, gates)
    delta.rule(DELTA, taken, 1 << 40, meta(FP32, 1, DELTA.value_heads * DELTA.value_width), 1)


def _latent(kernels: LayerKernels) -> None:
    latents, kept = LatentKernels(kernels), Kept(1 << 40, 1 << 41, LATENT * 2, TURNED * 2)
    spec = Latent(HEADS, WIDTH, TURNED, Norm(LATENT, 1e-6, BF16), BF16, interleaved=True)
    q, kv = meta(FP32, 1, HEADS * (WIDTH + TURNED)), meta(FP32, 1, LATENT + TURNED)
    angles, out = meta(FP32, CONTEXT, TURNED // 2), meta(FP32, 1, HEADS, LATENT + TURNED)
    latents.begin(spec, q, kv, meta(BF16, LATENT), (angles, angles), meta(torch.int64, 1), kept, out)


def _absorb(name: str, count: int, kernels: LayerKernels) -> None:
    latents, spec = (
        LatentKernels(kernels),
        Absorb(_matrix(name, 2 * HEADS * WIDTH, LATENT), HEADS, WIDTH, WIDTH, TURNED),
    )
    q, out = meta(FP32, count, HEADS * (WIDTH + TURNED)), meta(FP32, count, HEADS, LATENT + TURNED)
    latents.queries(spec, 1 << 40, q, out)
    latents.values(spec, 1 << 40, meta(FP32, count, HEADS, LATENT), meta(FP32, count, HEADS * WIDTH))


def _attend_latents(kernels: LayerKernels) -> None:
    spec, positions = Attend(HEADS, 1, LATENT, LATENT, BF16, WIDTH**-0.5, more=TURNED), meta(torch.int64, 1)
    cached = Cached(1 << 40, 1 << 40, 0, LATENT * 2, 0, LATENT * 2, 1 << 41, TURNED * 2)
    q, out = meta(FP32, 1, HEADS, LATENT + TURNED), meta(FP32, 1, HEADS, LATENT)
    kernels.attend(spec, q, cached, positions, None, out, CONTEXT)


DENSE = ("checkpoint", "int8-g32", "int4-g64")  # of queries, keys and values by one launch, of a row and of several
LAYER: dict[str, tuple[Callable[[LayerKernels], None], tuple[str, ...]]] = {
    "norm": (_norm, ("_rms",)),
    "norm-int4-g64": (_prepared, ("_rms",)),
    "router": (_router, ("_joined_routed",)),
    "rotate": (_rotate, ("_rotate",)),
    "attend": (_attend, ("_score", "_add_values")),
    "route": (_route, ("_route",)),
    "activate": (_activate, ("_activate",)),
    "groups": (_groups, ("_route",)),
    "gated": (_gated, ("_gated_heads",)),
    "cap": (_cap, ("_cap",)),
    "convolve": (_convolve, ("_convolve", "_keep_inputs")),
    "delta": (_delta, ("_inputs", "_rule")),
    "latent": (_latent, ("_latent",)),
    "latents": (_attend_latents, ("_score", "_add_values")),
    **{f"output-{name}": (functools.partial(_output, name), ("_joined_normed",)) for name in DENSE},
    **{
        f"absorb-{name}{several}": (functools.partial(_absorb, name, count), ("_queries", "_values"))
        for name in ABSORBED
        for several, count in (("", 1), ("-several", 2))
    },
}
NAMES = (
    *[f"{name} {kernel}" for name, (_, launched) in LAYER.items() for kernel in launched],
    *[f"{name} qkv{several}" for name in DENSE for several in ("", " of several")],
)
IN_TILES = tuple(f"{name} qkv in tiles" for name in DENSE if name != "checkpoint")  # where tensor cores multiply codes


def kernels(capability: int, names: tuple[str, ...] = (*LAYER, *DENSE)) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of each."""
    for name in names:
        recorder = Recorder()
        if name in LAYER:
            LAYER[name][0](LayerKernels(recorder))
        else:
            product = _product(name, HEADS * WIDTH, *[KV_HEADS * WIDTH] * 2, launcher=recorder)
            for count in (1, 2, TILED) if divmod(capability, 10) >= SINCE and name != "checkpoint" else (1, 2):
                product(meta(FP32, count, HIDDEN))
        for kernel, constants, given in recorder.launched:
            if kernel.__name__ == PREPARE:
                continue
            several = " of several" if constants.get("TOGETHER", 1) > 1 else ""
            if kernel.__name__ == "_tiled_joined":
                several = " in tiles"
            label = f"{name} qkv{several}" if name in DENSE else f"{name} {kernel.__name__}"
            yield label, compiled(kernel, constants, given, capability)


def _product(name: str, *outputs: int, inputs: int = HIDDEN, launcher: Launcher) -> DenseProducts:
    """By matrices of so many outputs."""
    return DenseKernels(launcher).by([Placed(_matrix(name, some, inputs), 1 << 40) for some in outputs])


def _matrix(name: str, outputs: int, inputs: int = HIDDEN) -> Matrix:
    codec = make_codec(name, specs={"w": PartSpec((outputs, inputs), BF16)}, dtype=BF16, device=META)
    assert isinstance(codec, Base)
    return matrix(codec, "w")
