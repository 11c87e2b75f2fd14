"""Conversions run on codes: right for every layout, and not done where they would cut across groups."""

from __future__ import annotations

import torch

from core.hf.coded import Merger, Planes, spread
from core.memory.codec.coded import QuantizedTensor

OUT, IN, GROUP = 6, 64, 32


def coded(format: str = "int4-g32", zero: bool = True, seed: int = 0) -> QuantizedTensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.rand(OUT, IN // GROUP, generator=random)
    return QuantizedTensor(
        format, torch.randint(0, 16, (OUT, IN), dtype=torch.uint8, generator=random), scale, scale + 1 if zero else None
    )


def weight(c: QuantizedTensor) -> torch.Tensor:
    shift = torch.zeros(1) if c.zero is None else spread(c.zero, c.codes.shape)
    return (c.codes.float() - 8) * spread(c.scale, c.codes.shape) + shift


def check(parts: dict[str, QuantizedTensor], convert: object, works: bool = True) -> None:
    merged = Merger().merge(parts, convert, "part")  # type: ignore[arg-type]
    assert (merged is not None) == works
    if merged is not None:
        assert torch.equal(weight(merged), convert({n: weight(c) for n, c in parts.items()}))  # type: ignore[operator]


def test_gate_over_up() -> None:
    for zero in (True, False):
        check({"gate": coded(zero=zero), "up": coded(zero=zero, seed=1)}, lambda t: torch.cat([t["gate"], t["up"]]))


def test_gate_beside_up_transposed_and_interleaved() -> None:
    def convert(planes: Planes) -> torch.Tensor:
        return torch.stack([planes["gate"], planes["up"]], 1).flatten(0, 1).t().contiguous()

    check({"gate": coded(), "up": coded(seed=1)}, convert)


def test_a_whole_number_of_groups_may_be_cut_off() -> None:
    check({"w": coded()}, lambda t: t["w"].chunk(2, 1)[0])


def test_cutting_across_groups_is_left_to_weights() -> None:
    check({"w": coded()}, lambda t: t["w"].view(OUT, 2, -1).transpose(1, 2).reshape(OUT, -1), works=False)
    check({"w": coded()}, lambda t: t["w"][:, :16], works=False)
    row = coded("int8", zero=False)._replace(scale=torch.rand(OUT, 1))
    check({"w": row}, lambda t: t["w"].repeat(1, 2), works=False)


def test_a_scale_of_fewer_dimensions_is_left_to_weights() -> None:
    flat = coded()._replace(scale=torch.rand(OUT), zero=None)
    check({"w": flat}, lambda t: t["w"].transpose(0, 1), works=False)


def test_parts_in_different_formats_are_left_to_weights() -> None:
    check({"a": coded(), "b": coded("int4-g32-sym", zero=False)}, lambda t: torch.cat([t["a"], t["b"]]), works=False)


def test_what_was_learnt_of_one_shape_is_not_used_for_another() -> None:
    merger = Merger()

    def convert(planes: Planes) -> torch.Tensor:
        return planes["w"].chunk(2, 1)[0]

    assert merger.merge({"w": coded()}, convert, "part") is not None
    odd = coded()._replace(scale=torch.rand(OUT, 1), zero=None, format="int4-g64-sym")
    assert merger.merge({"w": odd}, convert, "part") is None
