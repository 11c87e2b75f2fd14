"""Expert formats: exact where they promise it, close where they round, the same bytes everywhere."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ModelError, SettingError
from core.memory.codec import ALIGN, FORMATS, Codec, Numbers, PartSpec, SlotParts, make_codec
from core.memory.codec.grouped import Grouped
from core.memory.codec.measure import ffn_error, fill, random_expert, specs_of
from core.settings.formats import LOADABLE
from tests.kernel_cases import FEW
from tests.selection import by_turns, examples, layered

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = Numbers(torch.bfloat16, torch.float16, torch.float16)
BOUNDS = {  # relative squared error of normal weights with scales in bf16; clipping both ends alike: 1 to 10 % more
    "int4-g32": 0.00500,
    "int4-g64": 0.00675,
    "int4-g128": 0.00845,
    "int4-g32-sym": 0.00660,
    "int4-g64-sym": 0.00809,
    "int4-g128-sym": 0.00936,
    "nf4": 0.00730,
    "iq4_nl": 0.00546,
    "iq4_xs": 0.00546,
    "q6_k": 0.00032,
    "q5_k": 0.00125,
    "q4_k": 0.00510,
    "q2_k": 0.07600,
    "iq3_s": 0.00730,
    "iq3_xxs": 0.00700,
    "q3_k": 0.02120,
    "iq2_s": 0.02320,
    "iq2_xxs": 0.02870,
    "iq1_m": 0.02730,
    "iq1_s": 0.12500,
    "tq2_0": 0.14700,
    "mxfp4": 0.01250,
    "nvfp4": 0.00700,
    "int3": 0.02760,
    "int2": 0.10400,
}
ERRORS = {name: 1.22 * bound**0.5 for name, bound in BOUNDS.items()} | {"int8": 0.012, "int8-g32": 0.009}  # relative
ERRORS |= dict.fromkeys(("checkpoint", "bfloat16", "float16"), 0.003)
Parts = dict[str, torch.Tensor]


def make(
    name: str,
    parts: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    stored: Numbers | None = None,
) -> Codec:
    return make_codec(name, specs=specs_of(parts), dtype=dtype, device=CPU, is_transposed=transposed, stored=stored)


def portable(codec: Codec, dtype: torch.dtype | None = None) -> Grouped:
    """The oracle of a codec: the same blobs, dequantised and multiplied."""
    assert isinstance(codec, Grouped)
    return Grouped(codec.formats, codec.specs, dtype or codec.dtype, CPU, codec.is_transposed, codec.numbers)


def gpt_oss_like(inner: int = 256, hidden: int = 256) -> Parts:
    """Transposed, with biases: gate_up_proj [hidden, 2 * inner]."""
    rng = torch.Generator().manual_seed(3)
    return {
        "gate_up_proj": torch.randn(hidden, 2 * inner, generator=rng) * 0.1,
        "gate_up_proj_bias": torch.randn(2 * inner, generator=rng),
        "down_proj": torch.randn(inner, hidden, generator=rng) * 0.1,
        "down_proj_bias": torch.randn(hidden, generator=rng),
    }


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def reference(codec: Codec, parts: SlotParts, part: str, x: torch.Tensor, transposed: bool) -> torch.Tensor:
    weight = codec.dequantize(parts, part).double()
    return x.double() @ (weight if transposed else weight.t())


@pytest.mark.parametrize("dtype", layered(DTYPES, quick=lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize("transposed", layered([False, True], quick=bool))
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
def test_plain_blobs_keep_every_bit_and_slots_cast(stored: torch.dtype, dtype: torch.dtype) -> None:
    parts = {n: t.to(stored) for n, t in gpt_oss_like().items()}
    codec = make("checkpoint", parts, dtype, transposed=True, stored=Numbers(stored, stored, stored))
    assert codec.verbatim == (stored == dtype)
    blob = codec.encode(parts)
    for name, view in codec.blob_layout.views(blob).items():
        assert torch.equal(view, parts[name])
    raw = torch.empty(codec.slot_bytes + 512, dtype=torch.uint8)  # slots may be larger: whole pages
    codec.place(blob, raw)
    slot = codec.views(raw)
    for name, tensor in parts.items():
        got = slot.plain[name] if name.endswith("bias") else codec.dequantize(slot, name)
        assert torch.equal(got, tensor.to(dtype))
    assert torch.equal(
        fill(make("checkpoint", parts, dtype, True), parts).plain["down_proj_bias"], parts["down_proj_bias"].to(dtype)
    )


def test_cast_formats_name_their_number_type() -> None:
    parts = gpt_oss_like()
    for name in ("bfloat16", "float16"):
        codec = make(name, parts, torch.float32, True, Numbers(torch.float32, torch.float32, torch.float32))
        views = codec.blob_layout.views(codec.encode(parts))
        assert all(torch.equal(views[n], parts[n].to(getattr(torch, name))) for n in parts)
        assert name not in LOADABLE


@examples(100, fewer=10)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(DTYPES),
    inputs=st.integers(1, 3),
    outputs=st.integers(1, 13),
    rows=st.integers(1, 20),
    transposed=st.booleans(),
    bias=st.booleans(),
    stored=st.sampled_from([None, HALF]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    name: str,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    rows: int,
    transposed: bool,
    bias: bool,
    stored: Numbers | None,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    inputs, outputs = (
        inputs * max(128, FORMATS[name].grain),
        outputs * 8,
    )  # the packed products fall back where 16 does not divide
    weight = torch.randn(outputs, inputs, generator=rng) * 0.1
    parts = {"down_proj": weight.t().contiguous() if transposed else weight}
    if bias:
        parts["down_proj_bias"] = torch.randn(outputs, generator=rng)
    codec = make(name, parts, dtype, transposed, stored)
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
    slot = codec.views(raw)  # views before the bytes arrive
    codec.place(blob, raw)
    assert torch.equal(raw, blob) or not codec.verbatim
    if bias:
        kept = parts["down_proj_bias"].to(codec.numbers.weight)
        assert torch.equal(slot.plain["down_proj_bias"], kept.to(dtype))
    got = codec.dequantize(slot, "down_proj")
    assert (got.shape, got.dtype) == (parts["down_proj"].shape, dtype)
    assert relative(got, parts["down_proj"]) < ERRORS[name] * 1.15
    x = torch.randn(rows, inputs, generator=rng).to(dtype)
    want = reference(codec, slot, "down_proj", x, transposed)
    error = (codec.linear(slot, "down_proj", x).double() - want).norm() / (x.double().norm() * got.double().norm())
    assert error < {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}[dtype]


@pytest.mark.parametrize(
    ("name", "transposed"), by_turns([n for n in FORMATS if not FORMATS[n].is_plain], (False, True))
)
def test_a_blob_depends_on_its_numbers_alone(name: str, transposed: bool) -> None:
    """Whatever computes with it; and stored transposed or not, the same matrices give the same bytes."""
    parts = gpt_oss_like()
    if not transposed:
        parts = {n: t.t().contiguous() if t.dim() == 2 else t for n, t in parts.items()}
    blobs = [make(name, parts, dtype, transposed, HALF).encode(parts) for dtype in DTYPES]
    turned = {n: t.t().contiguous() if t.dim() == 2 else t for n, t in parts.items()}
    blobs += [
        portable(make(name, parts, transposed=transposed, stored=HALF)).encode(parts),
        make(name, turned, transposed=not transposed, stored=HALF).encode(turned),
    ]
    assert all(torch.equal(blob, blobs[0]) for blob in blobs)


@pytest.mark.parametrize("name", layered(FORMATS, quick=lambda name: name in FEW))
@pytest.mark.parametrize("dtype", layered(DTYPES, quick=lambda dtype: dtype == torch.bfloat16))
def test_error_of_a_whole_expert(name: str, dtype: torch.dtype) -> None:
    parts = random_expert(256, max(128, FORMATS[name].wide))
    error = ffn_error(make(name, parts, dtype), parts)
    assert error < 1.75 * ERRORS[name] + 0.006
    assert error > ERRORS[name] or FORMATS[name].is_plain  # the bound says something


@pytest.mark.parametrize("name", [n for n in FORMATS if not FORMATS[n].is_plain])
def test_the_portable_product_is_that_with_the_dequantised_weights(name: str) -> None:
    parts = gpt_oss_like()
    for dtype in DTYPES:
        codec = portable(make(name, parts, transposed=True, stored=HALF), dtype)
        slot = fill(codec, parts)
        x = torch.randn(5, 256).to(dtype)
        assert torch.equal(codec.linear(slot, "gate_up_proj", x), torch.mm(x, codec.dequantize(slot, "gate_up_proj")))


def test_int8_half_precision_does_not_overflow() -> None:
    weight, x = torch.full((16, 4096), 0.02), torch.full((3, 4096), 4.0, dtype=torch.float16)
    codec = make("int8", {"down_proj": weight}, torch.float16)
    assert codec.linear(fill(codec, {"down_proj": weight}), "down_proj", x).isfinite().all()


def test_what_cannot_be_done_is_said() -> None:
    specs = {"down_proj": PartSpec((64, 96), torch.float32)}
    with pytest.raises(ModelError, match=r"groups of 64 does not divide this model's 96 inputs.*: int8, int8-g32"):
        make_codec("int4-g64", specs=specs, dtype=torch.bfloat16, device=CPU)
    with pytest.raises(ModelError, match=r"another expert format: int8, checkpoint\."):
        make_codec("int3", specs={"down_proj": PartSpec((64, 40), torch.float32)}, dtype=torch.bfloat16, device=CPU)
    with pytest.raises(SettingError, match=r"no expert format 'int5'.*int4-g64"):
        make_codec("int5", specs=specs, dtype=torch.bfloat16, device=CPU)


def test_sizes_are_what_a_format_promises() -> None:
    parts = random_expert(1024, 512)
    weights = sum(t.numel() for t in parts.values())
    for name, format in FORMATS.items():
        codec = make(name, parts, stored=HALF)
        numbers = 2 if format.zero else 1  # scale and zero
        scales = numbers * (8 if format.scale else 16) / (format.group or 512)
        scales += numbers * 16 / format.wide if format.wide else 32 / 512 if format.has_row_scale else 0
        assert codec.blob_bytes * 8 / weights < (format.bits or 16) + scales + 0.01
        assert codec.slot_bytes <= 2 * weights, "a slot larger than bf16 weights"
