"""Expert formats: exact where they promise it, close where they round, the fast paths equal to the reference."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ModelError, SettingError
from core.memory.codec import ALIGN, FORMATS, Codec, PartSpec, SlotParts, make_codec
from core.memory.codec.int4 import Int4
from core.memory.codec.int4_cpu import BLOCKS, Int4Packed, block_rows, pack, unpack
from core.memory.codec.int8 import PACKED_ROWS
from core.memory.codec.measure import ffn_error, fill, random_expert, specs_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Parts = dict[str, torch.Tensor]


def make(name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16, transposed: bool = False,
         group: int = 32) -> Codec:
    return make_codec(name, specs=specs_of(parts), dtype=dtype, device=CPU, is_transposed=transposed, group_size=group)


def gpt_oss_like(inner: int = 96, hidden: int = 64) -> Parts:
    """Transposed, with biases: gate_up_proj [hidden, 2 * inner]."""
    rng = torch.Generator().manual_seed(3)
    return {"gate_up_proj": torch.randn(hidden, 2 * inner, generator=rng) * 0.1,
            "gate_up_proj_bias": torch.randn(2 * inner, generator=rng),
            "down_proj": torch.randn(inner, hidden, generator=rng) * 0.1,
            "down_proj_bias": torch.randn(hidden, generator=rng)}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def reference(codec: Codec, parts: SlotParts, part: str, x: torch.Tensor, transposed: bool) -> torch.Tensor:
    weight = codec.dequantize(parts, part).double()
    return x.double() @ (weight if transposed else weight.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_plain_equals_grouped_mm_bit_for_bit(dtype: torch.dtype, transposed: bool) -> None:
    for inputs, outputs in ((16, 32), (48, 192), (64, 128), (256, 96), (1024, 256)):
        rng = torch.Generator().manual_seed(inputs)
        groups = list(range(1, 34))
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        weights = torch.randn(len(groups), *shape, generator=rng).to(dtype)
        x = torch.randn(sum(groups), inputs, generator=rng).to(dtype)
        ends = torch.tensor(groups).cumsum(0).to(torch.int32)
        whole = F.grouped_mm(x, weights if transposed else weights.transpose(-2, -1), offs=ends)
        for expert, (rows, end) in enumerate(zip(groups, ends.tolist(), strict=True)):
            codec = make("checkpoint", {"down_proj": weights[expert]}, dtype, transposed)
            slot, at = fill(codec, {"down_proj": weights[expert]}), slice(end - rows, end)
            assert torch.equal(codec.linear(slot, "down_proj", x[at]), whole[at])


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_keeps_every_bit_or_casts(stored: torch.dtype, dtype: torch.dtype) -> None:
    parts = {n: t.to(stored) for n, t in gpt_oss_like().items()}
    codec = make("checkpoint", parts, dtype, transposed=True)
    slot = fill(codec, parts)
    for name, tensor in parts.items():
        got = slot.plain[name] if name.endswith("bias") else codec.dequantize(slot, name)
        assert torch.equal(got, tensor.to(dtype))


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(FORMATS), dtype=st.sampled_from(DTYPES), inputs=st.integers(1, 6),
       outputs=st.integers(1, 13), rows=st.integers(1, 20), transposed=st.booleans(), bias=st.booleans(),
       seed=st.integers(0, 99))
def test_any_shape(name: str, dtype: torch.dtype, inputs: int, outputs: int, rows: int, transposed: bool,
                   bias: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    inputs, outputs = inputs * 32, outputs * 8  # int4 falls back to the portable form where 16 does not divide
    weight = torch.randn(outputs, inputs, generator=rng) * 0.1
    parts = {"down_proj": weight.t().contiguous() if transposed else weight}
    if bias:
        parts["down_proj_bias"] = torch.randn(outputs, generator=rng)
    codec = make(name, parts, dtype, transposed)
    for layout in (codec.blob_layout, codec.slot_layout):
        ends = [0]
        for field in layout.fields.values():
            assert field.offset % ALIGN == 0
            assert field.offset >= ends[-1]
            ends.append(field.offset + field.bytes)
        assert ends[-1] <= layout.bytes < ends[-1] + ALIGN
    blob = codec.encode(parts)
    assert (blob.dtype, blob.shape) == (torch.uint8, (codec.blob_bytes,))
    assert torch.equal(blob, codec.encode(parts))  # deterministic, padding included
    raw = torch.empty(codec.slot_bytes, dtype=torch.uint8)
    slot = codec.views(raw)                        # views before the bytes arrive
    codec.place(blob, raw)
    if bias:
        assert torch.equal(slot.plain["down_proj_bias"], parts["down_proj_bias"].to(dtype))
    got = codec.dequantize(slot, "down_proj")
    assert (got.shape, got.dtype) == (parts["down_proj"].shape, dtype)
    assert relative(got, parts["down_proj"]) < {"checkpoint": 0.003, "int8": 0.012, "int4": 0.13}[name]
    x = torch.randn(rows, inputs, generator=rng).to(dtype)
    want = reference(codec, slot, "down_proj", x, transposed)
    error = (codec.linear(slot, "down_proj", x).double() - want).norm() / (x.double().norm() * got.double().norm())
    assert error < {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}[dtype]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 7, PACKED_ROWS, PACKED_ROWS + 1, 96, 97, 130])
def test_fast_paths_equal_the_reference(name: str, rows: int) -> None:
    """bf16 on a CPU: torch's packed products against dequantise-and-multiply in fp64, to the rounding of bf16."""
    parts = random_expert(256, 128)
    codec = make(name, parts, group=64)
    slot = fill(codec, parts)
    for part, width in (("gate_up_proj", 256), ("down_proj", 128)):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert relative(codec.linear(slot, part, x), reference(codec, slot, part, x, False)) < 5e-3


@pytest.mark.parametrize(("name", "group", "bound"), [
    ("checkpoint", 64, 0.008), ("int8", 64, 0.02), ("int4", 32, 0.15), ("int4", 64, 0.17), ("int4", 128, 0.19)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_a_whole_expert(name: str, group: int, bound: float, dtype: torch.dtype) -> None:
    parts = random_expert(256, 128)
    error = ffn_error(make(name, parts, dtype, group=group), parts)
    assert error < bound
    assert error > bound / 4 or name == "checkpoint"  # the bound says something


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_transposed_experts_are_quantised_along_the_input(name: str) -> None:
    """The same numbers, stored transposed, give the same bytes: groups and scales follow the inputs."""
    parts = gpt_oss_like()
    turned = {n: t.t().contiguous() if t.dim() == 2 else t for n, t in parts.items()}
    assert torch.equal(make(name, parts, transposed=True).encode(parts), make(name, turned).encode(turned))


def test_int8_survives_a_row_of_zeros_and_an_outlier() -> None:
    weight = torch.zeros(32, 64)
    weight[1, 5] = 1000.0
    codec = make("int8", {"down_proj": weight}, torch.float32)
    assert torch.equal(codec.dequantize(fill(codec, {"down_proj": weight}), "down_proj"), weight)


def test_int8_half_precision_does_not_overflow() -> None:
    weight, x = torch.full((16, 4096), 0.02), torch.full((3, 4096), 4.0, dtype=torch.float16)
    codec = make("int8", {"down_proj": weight}, torch.float16)
    y = codec.linear(fill(codec, {"down_proj": weight}), "down_proj", x)
    assert y.isfinite().all()


def test_clipping_beats_the_full_range(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = {"down_proj": torch.distributions.StudentT(4.0).sample((64, 256))}

    def error() -> float:
        codec = make("int4", weight, group=128)
        return relative(codec.dequantize(fill(codec, weight), "down_proj"), weight["down_proj"])

    clipped = error()
    monkeypatch.setattr("core.memory.codec.int4.CLIPS", (1.0,))
    assert clipped < error()


@pytest.mark.parametrize("block", BLOCKS.values())
@pytest.mark.parametrize("rows", [16, 32, 48, 64, 80, 112, 128, 192])
def test_packing_is_undone(block: int, rows: int) -> None:
    q = torch.randint(0, 256, (rows, 48), dtype=torch.uint8)
    packed = torch.empty_like(q)
    pack(q, packed, block)
    codes = unpack(packed, block)
    assert torch.equal(codes[:, ::2] | (codes[:, 1::2] << 4), q)


@pytest.mark.skipif(not block_rows(), reason="this CPU has neither AVX512 nor AVX2")
@pytest.mark.parametrize("rows", [16, 48, 64, 80, 112, 256])
def test_packing_is_torchs(rows: int) -> None:
    codes = torch.randint(0, 16, (rows, 64), dtype=torch.int32)
    q = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    packed = torch.empty_like(q)
    pack(q, packed, block_rows())
    assert torch.equal(packed, torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))


@pytest.mark.skipif(not block_rows(), reason="this CPU has neither AVX512 nor AVX2")
def test_the_packed_and_the_portable_int4_are_the_same_numbers() -> None:
    parts = random_expert(128, 96)
    packed = Int4Packed(specs_of(parts), torch.bfloat16, CPU, False, 32)
    portable = Int4(specs_of(parts), torch.bfloat16, CPU, False, 32)
    assert torch.equal(packed.encode(parts), portable.encode(parts))
    for part in parts:
        ours = packed.dequantize(fill(packed, parts), part)
        assert torch.equal(ours, portable.dequantize(fill(portable, parts), part))


def test_the_machine_decides_the_int4_form() -> None:
    specs = {"down_proj": PartSpec((64, 64), torch.float32)}
    assert isinstance(make_codec("int4", specs=specs, dtype=torch.float32, device=CPU), Int4)
    fast = make_codec("int4", specs=specs, dtype=torch.bfloat16, device=CPU)
    assert isinstance(fast, Int4Packed) == (block_rows() > 0)
    odd = make_codec("int4", specs={"down_proj": PartSpec((24, 64), torch.float32)}, dtype=torch.bfloat16, device=CPU)
    assert not isinstance(odd, Int4Packed)


def test_what_cannot_be_done_is_said() -> None:
    specs = {"down_proj": PartSpec((64, 96), torch.float32)}
    with pytest.raises(ModelError, match=r"groups of 64 does not divide this model's 96 inputs.*Choose group size 32"):
        make_codec("int4", specs=specs, dtype=torch.bfloat16, device=CPU, group_size=64)
    with pytest.raises(ModelError, match="Choose the format int8"):
        make_codec("int4", specs={"down_proj": PartSpec((64, 48), torch.float32)}, dtype=torch.bfloat16, device=CPU)
    with pytest.raises(SettingError, match="no expert format 'int3'"):
        make_codec("int3", specs=specs, dtype=torch.bfloat16, device=CPU)


def test_sizes_are_what_a_format_promises() -> None:
    parts = random_expert(1024, 512)
    plain = make("checkpoint", parts).blob_bytes
    assert make("int8", parts).blob_bytes < 0.51 * plain
    assert make("int4", parts, group=64).blob_bytes < 0.29 * plain
    assert make("int4", parts, group=64).slot_bytes == make("int4", parts, group=64).blob_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_on_a_gpu(name: str, transposed: bool) -> None:
    """Slots on the device, blobs on the host."""
    device, parts = torch.device("cuda"), gpt_oss_like()
    if not transposed:
        parts = {n: t.t().contiguous() if t.dim() == 2 else t for n, t in parts.items()}
    for dtype in DTYPES:
        codec = make_codec(name, specs=specs_of(parts), dtype=dtype, device=device, is_transposed=transposed,
                           group_size=32)
        slot = fill(codec, parts)
        for part, width in (("gate_up_proj", 64), ("down_proj", 96)):
            x = torch.randn(5, width).to(dtype)
            want = reference(codec, slot, part, x.to(device), transposed)
            assert relative(codec.linear(slot, part, x.to(device)), want) < 1e-2
            assert relative(codec.dequantize(slot, part).cpu(), parts[part]) < 0.13
        assert slot.plain["down_proj_bias"].device.type == "cuda"
