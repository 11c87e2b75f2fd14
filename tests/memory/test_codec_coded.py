"""Codes of a checkpoint: packed and taken over bit for bit, in either orientation; anything else is rounded anew."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec import FORMATS, Numbers, QuantizedTensor, make_codec
from core.memory.codec.bits import PLANES, pack, unpack
from core.memory.codec.measure import fill
from tests.memory.test_codec import CPU, gpt_oss_like, relative, specs_of
from tests.selection import covering

CODED = [n for n in FORMATS if not FORMATS[n].is_plain]
HALF = Numbers(torch.float16, torch.float16, torch.float16)


def codes_like(name: str, weight: torch.Tensor, transposed: bool, seed: int = 0) -> QuantizedTensor:
    """Random codes for a matrix as the model stores it, every code and both signs of zeros among them."""
    rng, format = torch.Generator().manual_seed(seed), FORMATS[name]
    out, inputs = weight.shape[::-1] if transposed else weight.shape
    codes = torch.randint(0, 1 << format.bits, (out, inputs), generator=rng)
    groups = (out, inputs // format.group) if format.group else (out,)
    scale = (torch.rand(groups, generator=rng) * 0.01 + 0.001).half()
    row = None
    if format.scale == "e4m3":  # subnormal ones among them
        scale = (
            torch.rand(groups, generator=rng)
            * torch.tensor([2.0**-6, 1.0, 448.0])[torch.randint(3, groups, generator=rng)]
        ).to(torch.float8_e4m3fn)
        row = torch.rand((out, 1), generator=rng) * 1e-3 + 1e-4
    if format.scale == "e8m0":
        scale = torch.randint(110, 130, groups, generator=rng).to(torch.uint8)
    zero = torch.randn(groups, generator=rng).mul(0.02).half() if format.zero else None
    if format.wide:
        scale = torch.randint(-128, 128, groups, generator=rng).to(torch.int8)
        zero = torch.randint(-128, 128, groups, generator=rng).to(torch.int8) if format.zero else None
        row = torch.randn((out, inputs // format.wide * (2 if format.zero else 1)), generator=rng).mul(1e-4).half()
    made = (codes - 128).to(torch.int8) if format.bits == 8 else codes.to(torch.uint8)
    coded = QuantizedTensor(name, made, scale, zero, row)
    return coded.turned() if transposed else coded


@given(bits=st.sampled_from(sorted(PLANES)), rows=st.integers(1, 5), inputs=st.integers(1, 5), seed=st.integers(0, 99))
def test_packing_is_undone(bits: int, rows: int, inputs: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, inputs * 8), generator=torch.Generator().manual_seed(seed))
    codes = (codes - 128).to(torch.int8) if bits == 8 else codes.to(torch.uint8)
    planes = pack(codes, bits)
    assert [p.shape for p in planes] == [(rows, inputs * plane) for plane in PLANES[bits]]
    assert torch.equal(unpack(planes, bits), codes)


def test_packed_bytes_are_what_the_format_says() -> None:
    """The even input in the low half; input i in bits 2 * (i % 4); the high bits of 3-bit codes apart."""
    codes = torch.tensor([[1, 2, 3, 0, 7, 6, 5, 4]], dtype=torch.uint8)
    assert [p.tolist() for p in pack(codes, 4)] == [[[0x21, 0x03, 0x67, 0x45]]]
    assert [p.tolist() for p in pack(codes, 3)] == [[[0b00111001, 0b00011011]], [[0b11110000]]]
    assert [p.tolist() for p in pack(codes & 3, 2)] == [[[0b00111001, 0b00011011]]]


@pytest.mark.parametrize(
    ("name", "transposed", "dtype"), covering(CODED, [False, True], [torch.float32, torch.bfloat16])
)
def test_codes_of_the_same_format_are_kept_bit_for_bit(name: str, transposed: bool, dtype: torch.dtype) -> None:
    parts = gpt_oss_like()
    if not transposed:
        parts = {n: t.t().contiguous() if t.dim() == 2 else t for n, t in parts.items()}
    given = {n: codes_like(name, t, transposed) if t.dim() == 2 else t for n, t in parts.items()}
    codec = make_codec(name, specs=specs_of(parts), dtype=dtype, device=CPU, is_transposed=transposed, stored=HALF)
    blob = codec.encode(given)
    views = codec.blob_layout.views(blob)
    for part in ("gate_up_proj", "down_proj"):
        coded = given[part]
        assert isinstance(coded, QuantizedTensor)
        turned = coded.turned() if transposed else coded
        planes = [views[f"{part}.q{i or ''}"] for i in range(len(PLANES[FORMATS[name].bits]))]
        assert torch.equal(unpack(planes, FORMATS[name].bits), turned.codes)
        assert torch.equal(views[f"{part}.scale"].view(torch.uint8), turned.scale.contiguous().view(torch.uint8))
        row = views.get(f"{part}.row", torch.empty(0))
        assert turned.row is None or torch.equal(row, turned.row.view(row.shape))
        assert turned.zero is None or torch.equal(views[f"{part}.zero"], turned.zero)
        assert torch.equal(views[f"{part}_bias"], parts[f"{part}_bias"].half())
        got = codec.dequantize(fill_blob(codec, blob), part)
        exact = turned.dequantized().t() if transposed else turned.dequantized()
        assert relative(got, exact) < (1e-6 if dtype == torch.float32 else 6e-3)


def fill_blob(codec: object, blob: torch.Tensor) -> object:
    raw = torch.empty(codec.slot_bytes, dtype=torch.uint8)  # type: ignore[attr-defined]
    codec.place(blob, raw)  # type: ignore[attr-defined]
    return codec.views(raw)  # type: ignore[attr-defined]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("held", ["int4-g32", "int8", "mxfp4", "nvfp4", "int3", "q6_k"])
def test_codes_of_another_format_are_rounded_from_their_values(transposed: bool, held: str) -> None:
    weight = torch.zeros(256, 64) if transposed else torch.zeros(64, 256)
    coded = codes_like(held, weight, transposed)
    exact = (coded.turned() if transposed else coded).dequantized()
    exact = exact.t().contiguous() if transposed else exact
    for name in FORMATS:
        codec = make_codec(
            name,
            specs=specs_of({"down_proj": weight}),
            dtype=torch.float32,
            device=CPU,
            is_transposed=transposed,
            stored=HALF,
        )
        if name != held:
            assert torch.equal(codec.encode({"down_proj": coded}), codec.encode({"down_proj": exact}))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("held", "other"),
    [("q4_k", "q5_k"), ("q3_k", "q6_k"), ("q4_k", "int4-g32"), ("iq4_xs", "iq4_nl")],
    ids=lambda name: name,
)
def test_codes_that_another_format_has_are_kept(held: str, other: str, transposed: bool) -> None:
    """Bit for bit where integers are kept too; else scales and zeros are rounded as the blob has them."""
    weight = torch.zeros(512, 64) if transposed else torch.zeros(64, 512)
    coded = codes_like(held, weight, transposed)
    turned = coded.turned() if transposed else coded
    exact = turned.dequantized()
    for stored, most in ((HALF, 2.0**-9), (Numbers(*(torch.float32,) * 3), 2.0**-20)):
        codec = make_codec(
            other,
            specs=specs_of({"w": weight}),
            dtype=torch.float32,
            device=CPU,
            is_transposed=transposed,
            stored=stored,
        )
        blob = codec.encode({"w": coded})
        got = codec.dequantize(fill_blob(codec, blob), "w")  # type: ignore[arg-type]
        off = ((got.t() if transposed else got) - exact).abs().max()
        assert off <= most * exact.abs().max() and (off == 0 or not FORMATS[other].wide)
        views = codec.blob_layout.views(blob)
        planes = [views[name] for name in ("w.q", "w.q1") if name in views]
        moved = FORMATS[other].offset - FORMATS[held].offset if FORMATS[other].wide else 0
        assert torch.equal(unpack(planes, FORMATS[other].bits), turned.codes + moved)
    assert turned.row is not None
    large = turned._replace(row=torch.full_like(turned.row, 6e4))
    assert large.held_in("iq4_nl" if held == "iq4_xs" else "int4-g32") is None, "no numbers of fp16"


def test_leading_dimensions_are_kept() -> None:
    one = codes_like("int4-g32", torch.zeros(16, 64), False)
    many = QuantizedTensor(
        one.format,
        one.codes.expand(3, -1, -1),
        one.scale.expand(3, -1, -1),
        one.zero.expand(3, -1, -1) if one.zero is not None else None,
    )
    assert torch.equal(many.dequantized(), one.dequantized().expand(3, -1, -1))
    assert many.turned().codes.shape == (3, 64, 16)
    assert fill(
        make_codec("int4-g32", specs=specs_of({"w": torch.zeros(16, 64)}), dtype=torch.float32, device=CPU), {"w": one}
    ).weights["w"][0].shape == (16, 32)
