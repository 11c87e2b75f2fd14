"""What the kernels are held against: the codec's own dequantised weights, and the portable way through an expert.

Used on CPU tensors under Triton's interpreter (tests.memory.interpret) and on a GPU (tests.gpu.test_kernels).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from core.memory.arena import Arena, Slot
from core.memory.codec import FORMATS, Codec, Numbers, PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.grouped import Grouped
from core.memory.codec.kernels import SlotKernels, make_kernels, scratch_bytes
from core.memory.codec.layers import LayerCodecs
from core.memory.codec.plain import Plain
from core.runtime.expert_math import ExpertMath

if TYPE_CHECKING:  # it takes seconds to import, and most cases need no engine
    from core.engine import Engine

# relative, of a whole expert: weights of 16 bits are rounded in the reference and not in the kernels, and the
# interpreter cuts bf16 off where GPUs round
BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CODED = [name for name, one in FORMATS.items() if not one.is_plain]
FEW = ("int8", "int4-g64", "iq4_nl", "int3")  # one of each kind of code: bytes, pairs, a table, three bits


def codec_of(
    name: str, parts: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, transposed: bool
) -> Base:
    """The codec whose slots are the portable ones, also where a CPU has a faster form. Scales are fp16 in packs."""
    stored = None if dtype == torch.float32 and name != "int4-g32" else Numbers(dtype, torch.float16, torch.bfloat16)
    specs = {n: PartSpec(tuple(t.shape), dtype) for n, t in parts.items()}
    codec = make_codec(name, specs=specs, dtype=dtype, device=device, is_transposed=transposed, stored=stored)
    assert isinstance(codec, Base)
    kind: type[Plain] | type[Grouped] = Plain if codec.is_plain else Grouped
    return kind(codec.formats, codec.specs, dtype, device, transposed, codec.numbers)


def slots_of(codec: Codec, experts: list[dict[str, torch.Tensor]]) -> list[Slot]:
    """Filled slots, each an allocation of its own."""
    arena = Arena(LayerCodecs.alike(codec, 1, len(experts)), codec.device)
    slots = [arena.allocate() for _ in experts]
    for slot, parts in zip(slots, experts, strict=True):
        codec.place(codec.encode(parts), slot.raw)
    return slots


def copies_of(codec: Codec, parts: dict[str, torch.Tensor], count: int) -> list[Slot]:
    """One expert in many slots."""
    arena, (first,) = Arena(LayerCodecs.alike(codec, 1, count), codec.device), slots_of(codec, [parts])
    slots = [arena.allocate() for _ in range(count)]
    for slot in slots:
        slot.raw.copy_(first.raw)
    return slots


def kernels_of(codec: Codec) -> SlotKernels:
    kernels = make_kernels(codec)
    assert kernels is not None
    return kernels


def matrices(count: int, outputs: int, inputs: int, transposed: bool, bias: bool) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(outputs * inputs)
    made = []
    for i in range(count):
        weight = torch.randn(outputs, inputs, generator=random) * 0.1 * (i + 1)
        parts = {"down_proj": weight.t().contiguous() if transposed else weight}
        if bias:
            parts["down_proj_bias"] = torch.randn(outputs, generator=random)
        made.append(parts)
    return made


def odd_inputs(name: str, long: bool) -> int:
    """No multiple of a block: a part of one, or `long`, two and a part."""
    if not FORMATS[name].group:
        return 301 if long else 45
    group = FORMATS[name].grain
    return group * (-(-570 // group) if long else 3)


def product_error(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool,
    bias: bool,
    outputs: int = 5,
    inputs: int = 0,
    count: int = 2,
) -> float:
    """Of products with several slots, a state each and (where there are biases) one for all, relative to fp64 over
    dequantised weights; as a share of the bound."""
    inputs = inputs or odd_inputs(name, long=False)
    experts = matrices(count, outputs, inputs, transposed, bias)
    codec = codec_of(name, experts[0], dtype, device, transposed)
    slots = slots_of(codec, experts)
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    worst = 0.0
    for states in (x, x[:1]) if bias else (x,):
        got = kernels_of(codec).multiply("down_proj", [slot.raw for slot in slots], states)
        assert got.shape == (count, outputs) and got.dtype == dtype
        for i, slot in enumerate(slots):
            weight = codec.dequantize(slot.parts(codec), "down_proj").double()
            state = states[min(i, len(states) - 1)].double()
            want = state @ (weight if transposed else weight.t())
            size = state.norm() * weight.norm()
            if bias:
                added = slot.parts(codec).plain["down_proj_bias"].double()
                want, size = want + added, size + added.norm()
            worst = max(worst, float((got[i].double() - want).norm() / size))
    return worst / (BOUNDS[dtype] / 4)


def dequantization_error(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool,
    outputs: int = 11,
    inputs: int = 0,
    count: int = 3,
) -> float:
    """Of dequantised weights, relative to the codec's own: a rounding of the number type at most, as its share."""
    experts = matrices(count, outputs, inputs or odd_inputs(name, long=True), transposed, bias=False)
    codec = codec_of(name, experts[0], dtype, device, transposed)
    slots, worst, seen = slots_of(codec, experts), 0.0, 0
    for first, weights in kernels_of(codec).dequantized("down_proj", [slot.raw for slot in slots]):
        assert weights.nbytes <= scratch_bytes(codec)
        for slot, got in zip(slots[first:], weights, strict=False):
            want = codec.dequantize(slot.parts(codec), "down_proj")
            want = want.t() if transposed else want
            worst = max(worst, float(((got.float() - want.float()).abs() / want.float().abs().amax()).max()))
            seen += 1
    assert seen == count
    return worst / (2 * torch.finfo(dtype).eps)


def gate(y: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


def interleaved(y: torch.Tensor) -> torch.Tensor:
    """As gpt_oss gates."""
    a, b = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
    return (b + 1) * a * torch.sigmoid(1.702 * a)


def expert_error(
    name: str, dtype: torch.dtype, device: torch.device, oss: bool, hidden: int = 64, inner: int = 64, experts: int = 3
) -> dict[str, float]:
    """Of whole experts through ExpertMath with kernels, relative to without, as a share of the bound: one token, few
    rows, and many. `oss` = transposed, with biases and an interleaved gate."""
    random = torch.Generator().manual_seed(3)
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    made = []
    for _ in range(experts):
        parts = {n: torch.randn(s[::-1] if oss else s, generator=random) * 0.1 for n, s in shapes.items()}
        if oss:
            parts |= {f"{n}_bias": torch.randn(s[0], generator=random) for n, s in shapes.items()}
        made.append(parts)
    codec = codec_of(name, made[0], dtype, device, oss)
    slots = slots_of(codec, made)
    module = SimpleNamespace(has_gate=True, has_bias=oss, _apply_gate=interleaved if oss else gate)
    plain, fast = ExpertMath(module, codec), ExpertMath(module, codec, kernels_of(codec))
    assert plain.grouped is None and fast.grouped is not None
    x = torch.randn(160, hidden, generator=random).to(device, dtype)
    errors = {"token": _difference(fast.token.multiply(slots, x[:1]), plain.token.multiply(slots, x[:1]))}
    for what, counts in {"few": [2, 1, 2], "many": [70, 1, 89]}.items():
        got, want = (math.prompt.multiply(slots, x[: sum(counts)], counts) for math in (fast, plain))
        errors[what] = _difference(got, want)
    return {what: error / BOUNDS[dtype] for what, error in errors.items()}


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype
    return float((got.double() - want.double()).norm() / want.double().norm())


@torch.inference_mode()
def logits(engine: Engine, prompt: int = 60) -> torch.Tensor:
    """Of a prompt, a short one behind it, and two tokens more, fp32."""
    from core.hf.cached_pass import cached_pass  # which imports transformers: a process that tries kernels needs none

    cache, found = engine.fresh_cache(), []
    for ids in ([*range(3, 3 + prompt)], [1, 7, 42], [11], [200]):
        engine.expert_cache.core.now += 1
        tokens = torch.tensor([ids], device=engine.device)
        found.append(cached_pass(engine.model, tokens, cache).logits[0].float())
    return torch.cat(found)


def engine_error(engine: Engine, prompt: int = 60) -> float:
    """Of an engine's logits with the kernels, which it must have taken, relative to without."""
    math = engine.wiring.math
    assert all(one.grouped is not None for one in math)
    fast = logits(engine, prompt)
    for one in math:
        one.choose(kernels=False)
    slow = logits(engine, prompt)
    engine.expert_cache.check_integrity()
    return _difference(fast, slow)
