"""Fast paths of a CPU in bf16: torch's byte layout, the same numbers as the portable form, products within bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.memory.codec import FORMATS, PartSpec, make_codec
from core.memory.codec.digits import BYTE, NF4, PACKED_ROWS, Digits, spread
from core.memory.codec.grouped import Grouped
from core.memory.codec.int4_cpu import BLOCKS, block_rows, pack, pack_bytes, pack_table, unpack
from core.memory.codec.int8 import PACKED_ROWS as INT8_ROWS
from core.memory.codec.int8 import Int8Rows
from core.memory.codec.measure import fill, random_expert
from core.memory.codec.tables import TABLES
from tests.memory.test_codec import CPU, HALF, gpt_oss_like, make, portable, reference, relative

CODED = [n for n in FORMATS if not FORMATS[n].is_plain]
ROWS = sorted({1, 7, INT8_ROWS, INT8_ROWS + 1, *PACKED_ROWS.values(), *(n + 1 for n in PACKED_ROWS.values())})
needs_kernel = pytest.mark.skipif(not block_rows(), reason="this CPU has neither AVX512 nor AVX2")


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("stored", [None, HALF])
def test_fast_products_equal_those_of_the_portable_weights(name: str, stored: object) -> None:
    """To the rounding of bf16: .4 % of the result at most; nf4's digits miss its values by .4 % too, at random."""
    parts = random_expert(256, 128)
    codec = make(name, parts, stored=stored)  # type: ignore[arg-type]
    slot, exact = fill(codec, parts), portable(codec, torch.float32)
    oracle = fill(exact, parts)
    for part, width in (("gate_up_proj", 256), ("down_proj", 128)):
        for rows in ROWS:
            x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
            got = codec.linear(slot, part, x)
            assert got.dtype == torch.bfloat16
            assert relative(got, reference(codec, slot, part, x, False)) < 5e-3
            assert relative(got, reference(exact, oracle, part, x, False)) < 7e-3


@needs_kernel
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_packed_and_the_portable_form_are_the_same_numbers(name: str, transposed: bool) -> None:
    """Bit for bit where scales are bf16, but for nf4, whose values digits approximate."""
    parts = gpt_oss_like()
    if not transposed:
        parts = {n: t.t().contiguous() if t.dim() == 2 else t for n, t in parts.items()}
    codec = make(name, parts, transposed=transposed)
    assert isinstance(codec, Int8Rows if name == "int8" else Digits)
    other = portable(codec)
    slot, oracle = fill(codec, parts), fill(other, parts)
    for part in ("gate_up_proj", "down_proj"):
        ours, theirs = codec.dequantize(slot, part), other.dequantize(oracle, part)
        assert torch.equal(ours, theirs) or (name == "nf4" and relative(ours, theirs) < 6e-3)
        assert torch.equal(slot.plain[part + "_bias"], oracle.plain[part + "_bias"])


@needs_kernel
@pytest.mark.parametrize("name", CODED)
def test_rows_that_fill_no_block(name: str) -> None:
    """48 and 80 outputs are no multiples of the 64 or 32 that the kernel interleaves."""
    for outputs in (16, 48, 80, 176):
        parts = {"down_proj": torch.randn(outputs, 128)}
        codec = make(name, parts)
        other, x = portable(codec), torch.randn(3, 128).bfloat16()
        want = reference(other, fill(other, parts), "down_proj", x, False)
        assert relative(codec.linear(fill(codec, parts), "down_proj", x), want) < 7e-3


@needs_kernel
def test_the_machine_decides_the_form() -> None:
    specs = {"down_proj": PartSpec((64, 128), torch.float32)}
    for name in CODED:
        odd = {"down_proj": PartSpec((24, 128), torch.float32)}
        fast = Int8Rows if name == "int8" else Digits
        assert type(make_codec(name, specs=specs, dtype=torch.bfloat16, device=CPU)) is fast
        assert type(make_codec(name, specs=specs, dtype=torch.float32, device=CPU)) is Grouped
        assert type(make_codec(name, specs=odd, dtype=torch.bfloat16, device=CPU)) is (fast if name == "int8"
                                                                                       else Grouped)


def test_int8_rows_that_sixteen_does_not_divide_are_multiplied_portably() -> None:
    """torch's packed int8 product reads past them."""
    parts = {"down_proj": torch.randn(40, 24)}
    codec, x = make("int8", parts), torch.randn(3, 24).bfloat16()
    assert type(codec) is Grouped
    got = codec.linear(fill(codec, parts), "down_proj", x)
    assert relative(got, x.double() @ parts["down_proj"].double().t()) < 0.02


def test_without_the_kernel_the_portable_form_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.memory.codec.digits.block_rows", lambda: 0)
    parts = random_expert(128, 64)
    codec = make("iq4_nl", parts)
    assert type(codec) is Grouped and codec.verbatim
    assert codec.linear(fill(codec, parts), "down_proj", torch.randn(2, 64).bfloat16()).shape == (2, 128)


@pytest.mark.parametrize("name", ["mxfp4", "iq4_nl", "nf4"])
def test_digits_make_the_values_of_a_table(name: str) -> None:
    found = spread(name)
    for code, value in enumerate(TABLES[name]):
        made = sum((digits[code] - 8) * step + zero for digits, step, zero in
                   zip(found.digits, found.steps, found.zeros, strict=True))
        assert made == value or (name == "nf4" and abs(made - value) < 0.003)
    assert all(0 <= digit < 16 for digits in found.digits for digit in digits)
    assert NF4[0] == spread("nf4").steps


@pytest.mark.parametrize("block", BLOCKS.values())
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 14), inputs=st.integers(1, 4), seed=st.integers(0, 99))
def test_packing_is_undone(block: int, rows: int, inputs: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 256, (rows * 16, inputs * 16), dtype=torch.uint8, generator=rng)
    packed = torch.empty_like(q)
    pack(q, packed, block)
    codes = unpack(packed, block)
    assert torch.equal(codes[:, ::2] | (codes[:, 1::2] << 4), q)

    wide = torch.empty(rows * 16, inputs * 32, dtype=torch.uint8)
    steps = torch.randperm(16, generator=rng), torch.randperm(16, generator=rng)
    words = [sum((step[torch.arange(1 << 16) >> 4 * i & 15] << 4 * i for i in range(4)), torch.tensor(0))
             .to(torch.int16) for step in steps]
    pack_table(q, wide, block, words)
    for digit, step in enumerate(steps):
        assert torch.equal(unpack(wide, block, digit, 2), step[codes.int()].to(torch.uint8))

    whole = torch.empty_like(q)
    pack_bytes(q.view(torch.int8), whole, block)
    high, low = (unpack(whole, block, digit, 2).int() - 8 for digit in (0, 1))
    made = high * BYTE.steps[0] + low * BYTE.steps[1] + sum(BYTE.zeros)
    assert torch.equal(made.to(torch.int8), q.view(torch.int8))


@needs_kernel
@pytest.mark.parametrize("rows", [16, 48, 64, 80, 112, 256])
def test_packing_is_torchs(rows: int) -> None:
    codes = torch.randint(0, 16, (rows, 64), dtype=torch.int32)
    q = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    packed = torch.empty_like(q)
    pack(q, packed, block_rows())
    assert torch.equal(packed, torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
