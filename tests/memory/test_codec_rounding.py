"""Quantisers: near the best that any scale could do, never off by more than a step, robust on odd groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec import FORMATS, Format, Numbers, numbers_of
from core.memory.codec.coded import QuantizedTensor, dequantize, expanded, scales
from core.memory.codec.quantize import quantize
from core.memory.codec.tables import TABLES, grid
from tests.memory.test_codec import BOUNDS
from tests.selection import examples, layered

FULL = Numbers(torch.float32, torch.float32, torch.float32)
CODED = [f for f in FORMATS.values() if not f.is_plain]
GROUPED = [f for f in CODED if f.group and f.bits < 8]


def heavy(rows: int, columns: int, seed: int = 0, freedom: float = 4.0) -> torch.Tensor:
    """Student-t weights [rows, columns], as heavy-tailed as trained ones."""
    rng = torch.Generator().manual_seed(seed)
    wide = torch.randn(int(freedom), rows, columns, generator=rng).square().mean(0).sqrt()
    return torch.randn(rows, columns, generator=rng) / wide * 0.02


def round_trip(weight: torch.Tensor, format: Format, numbers: Numbers = FULL) -> torch.Tensor:
    return dequantize(format, *quantize(weight, format, numbers_of(format, torch.float32, numbers)))


def error(weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((rounded - weight).square().sum())


def code_values(format: Format) -> torch.Tensor:
    if format.table:
        return torch.tensor(TABLES[format.table])
    return torch.arange(1 << format.bits).float() - (128 if format.bits == 8 else format.offset)


def brute_force(weight: torch.Tensor, format: Format) -> float:
    """The least squared error of one group [group] over a fine grid of scales (and zeros), nearest values taken."""
    values = code_values(format)
    largest = float(weight.abs().max())
    if format.scale == "e8m0":
        tried, shifts = [2.0**e for e in range(-20, 8)], [0.0]
    elif format.zero:
        low, high = float(weight.min()), float(weight.max())
        tried = [(high - low) * share / (len(values) - 1) for share in torch.linspace(0.3, 1.1, 41).tolist()]
        shifts = torch.linspace(low, high, 61).tolist()
    else:
        spread = float(values.abs().max())
        tried = [
            sign * largest * share / spread for share in torch.linspace(0.3, 1.3, 201).tolist() for sign in (1, -1)
        ]
        shifts = [0.0]
    best = float("inf")
    for scale in tried:
        points = values * scale + torch.tensor(shifts)[:, None]
        missed = (points[:, None, :] - weight[None, :, None]).abs().amin(-1)
        best = min(best, float(missed.square().sum(1).min()))
    return best


@pytest.mark.parametrize(
    "format", layered(GROUPED, quick=lambda f: f.name in ("int4-g64", "int3")), ids=lambda f: f.name
)
def test_near_the_best_that_any_scale_can_do(format: Format) -> None:
    """On heavy-tailed groups, against a brute-force search: mxfp4 finds the best power, the others nearly the best."""
    groups = heavy(32, format.group, seed=5)
    if format.wide:  # scales of a whole row
        ours = error(groups.view(1, -1), round_trip(groups.view(1, -1), format))
    else:
        ours = sum(error(group[None], round_trip(group[None], format)) for group in groups)
    best = sum(brute_force(group, format) for group in groups)
    allowed = {"mxfp4": 1.0, "nvfp4": 1.12, "nf4": 1.3, "iq4_nl": 1.12}.get(
        format.name, 1.3 if format.bits == 4 else 1.2
    )
    assert ours <= allowed * best * (1 + 1e-4)
    if format.scale == "e8m0":
        for group in groups:
            assert error(group[None], round_trip(group[None], format)) == pytest.approx(brute_force(group, format))


@pytest.mark.parametrize("format", CODED, ids=lambda f: f.name)
def test_codes_are_the_nearest_for_the_scales_chosen(format: Format) -> None:
    weight = heavy(16, 256, seed=2)
    codes, *numbers = quantize(weight, format, numbers_of(format, torch.float32, FULL))
    every = torch.arange(1 << format.bits, dtype=torch.int32)
    every = (every - 128).to(torch.int8) if format.bits == 8 else every.to(torch.uint8)
    missed = (dequantize(format, codes, *numbers) - weight).abs()
    for code in every[1:] if format.bits == 8 else every:  # -128 is not used: signs are alike
        other = (dequantize(format, torch.full_like(codes, int(code)), *numbers) - weight).abs()
        slack = 2e-4 * scales(numbers[0]).abs().max() * (1.0 if format.table == "nf4" else 0.0)  # see tables.grid
        assert bool((missed <= other + slack + 1e-7).all())


@examples(60)
@given(format=st.sampled_from(CODED), seed=st.integers(0, 999), size=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]))
def test_no_weight_inside_the_range_is_off_by_more_than_a_step(format: Format, seed: int, size: float) -> None:
    """Half a step of the widest gap between values, unless clipped; and a group's error never exceeds its weights."""
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)) * size
    _, scale, zero, row = made = quantize(weight, format, numbers_of(format, torch.float32, FULL))
    rounded = dequantize(format, *made)
    if format.wide and row is not None:
        (scale, zero), row = expanded(format, scale.float(), zero, row), None
    group = format.group or 256
    grouped, missed = weight.view(4, -1, group), (rounded - weight).view(4, -1, group)
    values = code_values(format)
    gap = float(values.float().sort().values.diff().max())
    signed = (scales(scale) if row is None else scales(scale) * row).view(4, -1, 1)
    step = signed.abs()
    middle = zero.view(4, -1, 1) if zero is not None else torch.zeros(1)
    ends = [middle + signed * float(v) for v in (values.min(), values.max())]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    inside = (grouped >= low) & (grouped <= high)
    assert bool((missed.abs() <= step * gap * 0.501 + 1e-9)[inside].all())
    assert bool((missed.square().sum(-1) <= grouped.square().sum(-1) * 1.001 + 1e-12).all())


@pytest.mark.parametrize("format", CODED, ids=lambda f: f.name)
@pytest.mark.parametrize("numbers", [FULL, Numbers(*(torch.bfloat16,) * 3), Numbers(*(torch.float16,) * 3)], ids=str)
def test_odd_groups(format: Format, numbers: Numbers) -> None:
    """Zeros, one outlier, one value, huge and tiny: finite, and exact where a scale can be."""
    weight = torch.zeros(6, 256)
    weight[1, 5], weight[2] = -1000.0, 0.25
    weight[3], weight[4] = 1e-9, torch.linspace(-3e4, 3e4, 256)
    weight[5] = torch.randn(256, generator=torch.Generator().manual_seed(1))
    rounded = round_trip(weight, format, numbers)
    assert rounded.isfinite().all()
    assert rounded[0].abs().max() < 1e-5
    if format.zero is False and format.name != "int8":
        others = rounded[1, format.group :]
        assert torch.equal(others, torch.zeros_like(others)) or 0.0 not in code_values(format)
    assert float((rounded[2] - 0.25).abs().max()) < 0.25 * (0.17 if format.bits < 8 else 0.01)
    assert float((rounded[1, 5] + 1000).abs()) < (0.3 if 0.0 in code_values(format) else 0.4) * 1000


@pytest.mark.parametrize("format", GROUPED, ids=lambda f: f.name)
def test_error_of_normal_weights(format: Format) -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(7))
    rounded = round_trip(weight, format, Numbers(*(torch.bfloat16,) * 3))
    assert error(weight, rounded) <= BOUNDS[format.name] * float(weight.square().sum())


@pytest.mark.parametrize(("name", "kind"), [("int4-g32-sym", "Q4_0"), ("int4-g32", "Q4_1"), ("iq4_nl", "Q4_0")])
@pytest.mark.parametrize("freedom", layered([4.0, 400.0], quick=lambda freedom: freedom == 4.0))
def test_nearer_than_the_rule_of_gguf_at_the_same_bits(name: str, kind: str, freedom: float) -> None:
    gguf = pytest.importorskip("gguf")
    weight, type = heavy(64, 1024, seed=3, freedom=freedom), gguf.GGMLQuantizationType[kind]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), type), type)
    ours = error(weight, round_trip(weight, FORMATS[name], Numbers(*(torch.float16,) * 3)))
    assert ours < 0.94 * error(weight, torch.from_numpy(theirs.copy()))


def plain_rule(grouped: torch.Tensor, format: Format) -> torch.Tensor:
    """Squared error [..., 1] of groups whose ends, or whose extreme, are given the ends of the codes."""
    values = code_values(format)
    if format.zero:
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (len(values) - 1)).clamp(min=1e-7)
        points = (values - values[0]) * scale + low
    else:
        extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
        scale = extreme / max(values.tolist(), key=abs)
        points = values * torch.where(scale.abs() < 1e-7, 1e-7, scale)
    missed = (points[..., None, :] - grouped[..., None]).abs().amin(-1)
    return missed.square().sum(-1, keepdim=True)


@examples(60)
@given(
    format=st.sampled_from([f for f in GROUPED if f.table != "mxfp4" and not f.wide]),
    seed=st.integers(0, 9999),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    middle=st.sampled_from([0.0, 0.5, -20.0]),
    outlier=st.sampled_from([0.0, 6.0, -40.0]),
)
def test_no_group_is_worse_than_by_the_plain_rule(
    format: Format, seed: int, size: float, middle: float, outlier: float
) -> None:
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)) + middle
    weight[:, seed % 256] += outlier
    weight *= size
    grouped = weight.view(4, -1, format.group)
    missed = (round_trip(weight, format).view_as(grouped) - grouped).square().sum(-1, keepdim=True)
    slack = 1e-9 * grouped.square().sum(-1, keepdim=True) * (100.0 if format.table == "nf4" else 1.0)  # see tables.grid
    assert bool((missed <= plain_rule(grouped, format) * (1 + 1e-4) + slack).all())


@pytest.mark.parametrize("name", TABLES)
def test_cells_hold_the_nearest_value(name: str) -> None:
    cells = grid(name, torch.device("cpu"))
    values = torch.tensor(TABLES[name])
    ratios = torch.linspace(float(values.min()) * 1.5, float(values.max()) * 1.5, 4001)
    found = cells.values[cells.cells(ratios)]
    missed, best = (found - ratios).abs(), (values - ratios[:, None]).abs().amin(1)
    assert bool((missed <= best + (2e-4 if name == "nf4" else 1e-5)).all())
    assert torch.equal(values[cells.codes.int()], cells.values)


def test_powers_of_two_are_exponents() -> None:
    exponents = torch.tensor([0, 1, 100, 127, 130, 254], dtype=torch.uint8)
    assert torch.equal(scales(exponents).double(), 2.0 ** (exponents.double() - 127))
    codes, twice = torch.arange(16, dtype=torch.uint8).repeat(2)[None], torch.tensor([[128]], dtype=torch.uint8)
    coded = QuantizedTensor("mxfp4", codes, twice, None)
    assert coded.dequantized()[0, :16].tolist() == [2 * v for v in TABLES["mxfp4"]]
