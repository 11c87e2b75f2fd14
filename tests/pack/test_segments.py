"""Segments: cutting and joining are exact inverses in every format, and each segment is a small expert of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import SettingError
from core.memory.codec import FORMATS, Codec, PartSpec, make_codec
from core.memory.codec.segments import ExpertParts, Segments, inner_of, specs_of, top_of

CPU, HIDDEN, INNER = torch.device("cpu"), 128, 256
KINDS = [
    dict(is_transposed=t, has_gate=g, is_concatenated=c, bias=b)
    for t, g, c, b in (
        (False, True, True, False),
        (True, True, False, True),
        (False, False, True, True),
        (True, True, True, False),
    )
]


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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "".join(str(int(v)) for v in kind.values()))
def test_segments_are_experts_that_add_up(name: str, kind: dict[str, Any]) -> None:
    experts, rng = experts_of(**kind), torch.Generator().manual_seed(1)
    codec = codec_of(name, experts)
    blob = codec.encode({n: torch.randn(s.shape, generator=rng) * 0.2 for n, s in experts.parts.items()})
    cutter = Segments(codec.blob_layout, experts, top_of(experts, FORMATS[name].group, 0.5))
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
    assert [s.start for s in cutter.segments] == [0, 128] and cutter.segments[-1].stop == INNER


@given(
    name=st.sampled_from(sorted(FORMATS)),
    kind=st.sampled_from(KINDS),
    split=st.floats(0.01, 0.99),
    inner=st.sampled_from((256, 384, 640)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_cut_and_join_are_inverses(name: str, kind: dict[str, Any], split: float, inner: int, seed: int) -> None:
    experts = experts_of(**kind, inner=inner)
    layout, group = codec_of(name, experts).blob_layout, FORMATS[name].group
    blob = torch.zeros(layout.bytes, dtype=torch.uint8)
    for field in layout.fields.values():  # any bits at all: nothing may be computed on the way
        at = slice(field.offset, field.offset + field.bytes)
        blob[at] = torch.randint(
            0, 256, (field.bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
    top = top_of(experts, group, split)
    assert 0 < top < inner and top % max(group, 16) == 0 and abs(top - split * inner) <= max(group, 16)
    cutter = Segments(layout, experts, top)
    back = torch.full_like(blob, 7)
    cutter.join(cutter.cut(blob), back)
    assert torch.equal(back, blob)


def test_what_cannot_be_cut_is_refused() -> None:
    experts = experts_of(**KINDS[0], inner=96)
    for split in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(SettingError, match="no share between 0 and 1"):
            top_of(experts, 32, split)
    with pytest.raises(SettingError, match="96 inner neurons cannot be cut: a segment needs 64"):
        top_of(experts, 64, 0.5)
    assert top_of(experts, 32, 0.01) == 32 and top_of(experts, 32, 0.99) == 64 and top_of(experts, 0, 0.5) == 48
