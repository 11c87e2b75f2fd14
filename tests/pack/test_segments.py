"""Segments: cutting and joining are exact inverses in every format, and each segment is a small expert of its own."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from core.errors import SettingError
from core.memory.codec import FORMATS, Codec, PartSpec, in_blocks, make_codec
from core.memory.codec.segments import ExpertParts, Segments, inner_of, specs_of, stops_of
from tests.selection import examples, layered

CPU, HIDDEN, INNER = torch.device("cpu"), 256, 512
KINDS = [
    dict(is_transposed=t, has_gate=g, is_concatenated=c, bias=b)
    for t, g, c, b in (
        (False, True, True, False),
        (True, True, False, True),
        (False, False, True, True),
        (True, True, True, False),
    )
]

every_codec = pytest.mark.parametrize(
    ("name", "kind"),
    layered(  # every format, each with one kind of expert in turn
        itertools.product(FORMATS, KINDS),
        quick=lambda case: list(FORMATS).index(case[0]) % len(KINDS) == KINDS.index(case[1]),
    ),
    ids=lambda value: value if isinstance(value, str) else "".join(str(int(v)) for v in value.values()),
)


def experts_of(
    is_transposed: bool, has_gate: bool, is_concatenated: bool, bias: bool, inner: int = INNER
) -> ExpertParts:
    up, rows = ("gate_up_proj", 2 * inner) if has_gate else ("up_proj", inner)
    shapes: dict[str, tuple[int, ...]] = {up: (rows, HIDDEN), "down_proj": (HIDDEN, inner)}
    if is_transposed:
        shapes = {n: s[::-1] for n, s in shapes.items()}
    if bias:
        shapes |= {f"{up}_bias": (rows,), "down_proj_bias": (HIDDEN,)}
    return ExpertParts(
        {n: PartSpec(s, torch.float32) for n, s in shapes.items()}, is_transposed, has_gate, is_concatenated
    )


def codec_of(name: str, experts: ExpertParts, neurons: int | None = None) -> Codec:
    return make_codec(
        name,
        specs=specs_of(experts, neurons or inner_of(experts)),
        dtype=torch.float32,
        device=CPU,
        is_transposed=experts.is_transposed,
    )


def forward(codec: Codec, blob: torch.Tensor, experts: ExpertParts, x: torch.Tensor) -> torch.Tensor:
    slot = torch.zeros(codec.slot_bytes, dtype=torch.uint8)
    codec.place(blob, slot)
    parts = codec.views(slot)
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = codec.linear(parts, up, x) + parts.plain.get(f"{up}_bias", torch.zeros(()))
    if experts.has_gate:
        gate, value = inner.chunk(2, -1) if experts.is_concatenated else (inner[..., ::2], inner[..., 1::2])
        inner = F.silu(gate) * value
    else:
        inner = F.relu(inner)
    return codec.linear(parts, "down_proj", inner) + parts.plain.get("down_proj_bias", torch.zeros(()))


@every_codec
def test_segments_are_experts_that_add_up(name: str, kind: dict[str, Any]) -> None:
    experts, rng = experts_of(**kind), torch.Generator().manual_seed(1)
    codec = codec_of(name, experts)
    blob = codec.encode({n: torch.randn(s.shape, generator=rng) * 0.2 for n, s in experts.parts.items()})
    cutter = Segments(codec.blob_layout, experts, stops_of(experts, FORMATS[name].grain, 2))
    cut, back = cutter.cut(blob), torch.full_like(blob, 7)
    cutter.join(cut, back)
    assert torch.equal(back, blob)
    x = torch.randn(3, HIDDEN, generator=rng)
    total = torch.zeros(3, HIDDEN)
    for start, stop, offset, layout in cutter.segments:
        small = codec_of(name, experts, stop - start)
        assert small.blob_layout == layout
        total += forward(small, cut[offset : offset + layout.bytes], experts, x)
    torch.testing.assert_close(
        total,
        forward(codec, blob, experts, x),
        rtol=1e-2 if name.endswith("16") else 1e-4,
        atol=1e-2 if name.endswith("16") else 1e-4,
    )
    assert [s.start for s in cutter.segments] == [0, 256] and cutter.segments[-1].stop == INNER


@given(
    name=st.sampled_from(sorted(FORMATS)),
    kind=st.sampled_from(KINDS),
    blocks=st.sampled_from((2, 3, 5, 6, 10)),
    seed=st.integers(0, 99),
    equal=st.booleans(),
)
@examples(40)
def test_cut_and_join_are_inverses(name: str, kind: dict[str, Any], blocks: int, seed: int, equal: bool) -> None:
    experts, group = experts_of(**kind, inner=blocks * 256), FORMATS[name].grain
    layout = codec_of(name, experts).blob_layout
    blob = torch.zeros(layout.bytes, dtype=torch.uint8)
    for field in layout.fields.values():  # any bits at all: nothing may be computed on the way
        at = slice(field.offset, field.offset + field.bytes)
        blob[at] = torch.randint(
            0, 256, (field.bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
    stops = stops_of(experts, group, blocks)
    assert stops[-1] == blocks * 256 and {b - a for a, b in zip((0, *stops), stops, strict=False)} == {256}
    cutter = Segments(layout, experts, stops if equal else (stops[0], stops[-1]))
    assert len({one.layout.bytes for one in cutter.segments}) == 1 or not equal
    back = torch.full_like(blob, 7)
    cutter.join(cutter.cut(blob), back)
    assert torch.equal(back, blob)


def test_what_cannot_be_cut_is_refused() -> None:
    experts = experts_of(**KINDS[0], inner=96)
    with pytest.raises(SettingError, match=r"96 inner neurons cannot be cut into 2 equal .* of 64.*: 1\."):
        stops_of(experts, 64, 2)
    with pytest.raises(SettingError, match=r"into 4 equal blocks of whole groups of 16.*: 1, 2, 3, 6\."):
        stops_of(experts, 0, 4)
    assert stops_of(experts, 32, 3) == [32, 64, 96] and stops_of(experts, 0, 1) == [96]


@every_codec
def test_a_codec_of_blocks_computes_the_whole_experts_sum(name: str, kind: dict[str, Any]) -> None:
    experts, rng = experts_of(**kind), torch.Generator().manual_seed(2)
    parts = {n: torch.randn(s.shape, generator=rng) * 0.2 for n, s in experts.parts.items()}
    whole, made = codec_of(name, experts), dict(experts=experts, dtype=torch.float32, device=CPU)
    blocks = in_blocks(name, blocks=2, **made)
    assert (blocks.blocks, whole.blocks, in_blocks(name, blocks=1, **made).blocks) == (2, 1, 1)
    assert blocks.expert_layout == whole.blob_layout and blocks.blob_bytes == 2 * blocks.block_bytes
    blob, x = blocks.encode(parts), torch.randn(3, HIDDEN, generator=rng)
    total = sum(forward(blocks, one, experts, x) for one in blob.split(blocks.block_bytes))
    loose = 1e-2 if name.endswith("16") else 1e-4
    torch.testing.assert_close(total, forward(whole, whole.encode(parts), experts, x), rtol=loose, atol=loose)
