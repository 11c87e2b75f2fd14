"""Products out of codes on a CPU: as near to those of the portable weights as their number type allows."""

import functools
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from core.memory.codec import FORMATS, Numbers, SlotParts
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.direct import FusedCodec
from core.memory.codec.fast.products import CanonicalProducts
from core.memory.codec.grouped import Grouped
from core.memory.codec.matrix import matrix
from core.memory.codec.measure import fill
from core.memory.codec.native import products
from core.memory.codec.native.products import Products
from core.system.native import compile
from core.system.native.compile import widths
from tests.kernel_cases import FEW
from tests.logged import Logged
from tests.memory.test_codec import HALF, gpt_oss_like, make, portable, reference, relative
from tests.memory.test_codec_coded import codes_like
from tests.selection import layered

CODED = [n for n in FORMATS if not FORMATS[n].is_plain and not FORMATS[n].wide]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STATES = {BF16: 2.0**-20, FP16: 2.0**-16}  # of a result: what states may lose on their way to whole numbers
TABLE = 2.0**-14  # what nf4's values lose, of the largest of them
WIDTHS = [
    pytest.param(width, marks=pytest.mark.skipif(width not in widths(), reason=f"no {width}-byte vectors here"))
    for width in (64, 32)
]


def by_turns(cases: Iterable[Any]) -> list[Any]:
    """Each case with vectors of one width, the next with those of the other; with the other one they are long, where
    this CPU has both. Formats other than FEW are long."""
    both = len(widths()) > 1
    names = [(case[0] if type(case) is tuple else case, case) for case in cases]
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            *width.values,
            marks=[*width.marks, *([pytest.mark.long(0.1)] if (both and (at + turn) % 2) or name not in FEW else [])],
        )
        for at, (name, case) in enumerate(names)
        for turn, width in enumerate(WIDTHS)
    ]


needs_kernels = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")


class Case(NamedTuple):
    """Two experts in their slots, and what is made for their matrix."""

    codec: Grouped
    products: Products
    slots: list[SlotParts]
    at: list[int]  # their addresses
    weights: list[torch.Tensor]  # [out, in], fp64

    def near(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """No further from the exact result than this is when rounded to the number type, but for a margin."""
        margin = STATES[got.dtype] + (TABLE / 2 if self.codec.name == "nf4" else 0.0)
        assert (got.dtype, got.shape) == (self.codec.dtype, want.shape)
        assert relative(got, want) <= relative(want.to(got.dtype), want) + margin


def case(
    name: str,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    width: int,
    stored: Numbers | None = None,
    powers: bool = False,
) -> Case:
    """`powers`: scales are powers of two and zeros quarters, so that products with whole numbers are exact in fp32."""
    given = [codes_like(name, torch.empty(outputs, inputs), False, seed) for seed in range(2)]
    if powers:
        given = [
            coded._replace(
                scale=torch.full_like(coded.scale, 126)
                if name == "mxfp4"
                else ((coded.scale.float() > 0.006).half() / 64 + 1 / 64).to(coded.scale.dtype),
                row=None if coded.row is None else torch.full_like(coded.row, 0.25),
                zero=None if coded.zero is None else (coded.zero * 64).round() / 4,
            )
            for coded in given
        ]
    codec = make(name, {"down_proj": torch.empty(outputs, inputs)}, dtype, stored=stored)
    oracle = portable(codec, FP32)
    slots = [fill(codec, {"down_proj": coded}) for coded in given]  # type: ignore[dict-item]
    assert isinstance(codec, Grouped)
    return Case(
        codec,
        Products(matrix(codec, "down_proj"), dtype, width),
        slots,
        [slot.at for slot in slots],
        [oracle.dequantize(slot, "down_proj").double() for slot in slots],
    )


def inputs_of(name: str) -> int:
    """No multiple of what the widest vector holds."""
    return 1152 if FORMATS[name].group == 128 else 1088


def states(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize(("name", "width"), by_turns(CODED))
@pytest.mark.parametrize("dtype", layered([BF16, FP16], quick=lambda dtype: dtype == BF16), ids=str)
def test_products_are_rounded_once(name: str, dtype: torch.dtype, width: int) -> None:
    inputs = inputs_of(name)
    made = case(name, 6, inputs, dtype, width)
    for count in (1, 3, 4, 5, 9):
        x = states(count, inputs, dtype)
        made.near(made.products.many(made.at[1], x), x.double() @ made.weights[1].t())
    turns = [0, 1, 0]
    for count in (1, 3):
        x = states(count, inputs, dtype)
        made.near(
            made.products.few([made.at[i] for i in turns], x),
            torch.stack([made.weights[i] @ x[n % count].double() for n, i in enumerate(turns)]),
        )
    wide, plain = made.products.dequantized(made.at[0]), made.codec.weight(made.slots[0].weights["down_proj"])
    assert torch.equal(made.products.unpacked(made.at[0], x), x @ wide.t())
    largest = plain.double().abs().view(6, -1, 64).amax(-1).repeat_interleave(64, 1)
    missed = (wide.double() - plain.double()).abs() / largest
    assert torch.equal(wide, plain) or (name == "nf4" and missed.max() <= TABLE + torch.finfo(dtype).eps)


@pytest.mark.parametrize(("name", "width"), by_turns(CODED))
def test_several_rows_of_a_slot_are_each_the_one_alone(name: str, width: int) -> None:
    made = case(name, 6, inputs_of(name), BF16, width)
    runs = [(4, [made.at[0], made.at[1], made.at[0]]), (3, [made.at[1]]), (2, [made.at[0]]), (1, [*made.at[:2]])]
    own = [slot for count, some in runs for slot in some for _ in range(count)]
    x = states(len(own), inputs_of(name), BF16)
    assert torch.equal(made.products.several(runs, x), made.products.few(own, x))


@pytest.mark.parametrize(("name", "width"), by_turns(n for n in CODED if n != "nf4"))
def test_every_code_meets_its_own_number(name: str, width: int) -> None:
    """Where nothing needs rounding on the way, results are the exact ones, rounded: bit for bit."""
    made = case(name, 6, inputs_of(name), BF16, width, powers=True)
    x = torch.randint(-16, 17, (5, inputs_of(name)), generator=torch.Generator().manual_seed(1)).bfloat16()
    for i in range(2):
        want = (x.double() @ made.weights[i].t()).bfloat16()
        assert torch.equal(made.products.many(made.at[i], x), want)
        assert torch.equal(made.products.few([made.at[i]] * 5, x), want)


@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "width"),
    by_turns(
        [
            ("int8", 2, 32),
            ("int8", 30, 2880),
            ("int8-g32", 6, 96),
            ("int4-g32", 2, 32),
            ("int4-g32", 30, 96),
            ("int4-g64", 30, 2880),
            ("int4-g128-sym", 2, 384),
            ("nf4", 6, 64),
            ("mxfp4", 6, 32),
            ("iq4_nl", 30, 96),
            ("int3", 2, 64),
            ("int3", 6, 192),
            ("int2", 30, 64),
            ("int2", 2, 2880),
        ]
    ),
)
def test_rows_that_fill_no_vector(name: str, outputs: int, inputs: int, width: int) -> None:
    made = case(name, outputs, inputs, FP16, width)
    x = states(5, inputs, FP16)
    made.near(made.products.many(made.at[0], x), x.double() @ made.weights[0].t())
    made.near(made.products.few(made.at[1:], x[:1]), x[:1].double() @ made.weights[1].t())


@pytest.mark.parametrize(
    "name", layered(["int8", "int4-g32", "int3", "iq4_nl"], quick=lambda name: name in ("int8", "iq4_nl"))
)
@pytest.mark.parametrize(
    "stored",
    [Numbers(BF16, FP16, FP16), Numbers(BF16, FP32, FP32), Numbers(FP16, FP16, FP32)],
    ids=["fp16", "fp32", "both"],
)
@needs_kernels
def test_numbers_of_a_blob_may_have_another_type(name: str, stored: Numbers) -> None:
    made = case(name, 2, 192, BF16, 0, stored)
    x = states(5, 192, BF16)
    made.near(made.products.many(made.at[0], x), x.double() @ made.weights[0].t())
    assert torch.equal(made.products.dequantized(made.at[0]), made.codec.weight(made.slots[0].weights["down_proj"]))


@pytest.mark.parametrize("width", WIDTHS)
def test_exponents_from_the_smallest_to_no_number(width: int) -> None:
    made = case("mxfp4", 6, 96, BF16, width)
    tensors = made.slots[0].weights["down_proj"]
    tensors[1].copy_(torch.tensor([[0] * 3, [0, 1, 0], [1, 2, 3], [127] * 3, [130, 255, 1], [255] * 3]))
    x = states(5, 96, BF16) * 2.0**40
    got = made.products.many(made.at[0], x)
    weight = portable(made.codec, FP32).weight(tensors).double()
    assert bool(got[:, 4:].isnan().all()) and float(weight[0].abs().max()) == 6 * 2.0**-127
    for row in range(4):  # their sizes differ by far: one at a time
        made.near(got[:, row], x.double() @ weight[row])
    wide, plain = made.products.dequantized(made.at[0]), made.codec.weight(tensors)
    torch.testing.assert_close(wide, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", layered(["int8", "int4-g64", "nf4", "mxfp4", "int2"], quick="int8".__eq__))
@needs_kernels
def test_a_codec_multiplies_as_the_model_stores_it_and_without_biases(name: str) -> None:
    parts = gpt_oss_like()
    codec = make(name, parts, FP16, True, HALF)
    assert isinstance(codec, FusedCodec) and not codec.verbatim  # biases are bf16 in blobs, fp16 in slots
    assert make(name, parts, FP16, True).verbatim
    slot, exact = fill(codec, parts), portable(codec, FP32)
    for part, inputs in (("gate_up_proj", 256), ("down_proj", 256)):
        for count in (1, 7, 40):
            x = states(count, inputs, FP16)
            want = reference(exact, slot, part, x, True)
            for way in codec.ways(part).values():
                assert relative(way(slot, x), want) < 1e-3
            got = codec.linear(slot, part, x)
            assert relative(got, want) < 3e-4
        assert torch.equal(codec.stacked([slot] * 6, part, x[:6]), got[:6])  # whatever else is multiplied at once
        assert torch.equal(codec.linear(slot, part, x.t().contiguous().t()), got)
        assert torch.equal(codec.linear(slot, part, x[:6].view(2, 3, -1)).view(6, -1), got[:6])
        assert torch.equal(codec.linear(slot, part, x[0]), got[0])
        assert codec.linear(slot, part, x[:0]).shape == (0, want.shape[1])


@pytest.mark.parametrize("name", CODED)
@needs_kernels
def test_the_machine_decides_the_form(name: str) -> None:
    parts = {"down_proj": torch.randn(6, inputs_of(name))}
    for dtype, form in ((BF16, FusedCodec), (FP16, FusedCodec), (FP32, Grouped)):
        assert type(codec := make(name, parts, dtype)) is form
        assert codec.verbatim and codec.direct == (form is FusedCodec)
    for outputs, inputs in [(33, 128)] + [(64, 40), (64, 48)] * (name == "int8"):
        weight = torch.randn(outputs, inputs)
        codec, x = make(name, {"down_proj": weight}, stored=HALF), states(3, inputs, BF16)
        slot = fill(codec, {"down_proj": weight})
        assert type(codec) is Grouped
        assert torch.equal(codec.linear(slot, "down_proj", x), x @ codec.dequantize(slot, "down_proj").t())


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].wide])
def test_integer_scales_are_dequantised_in_the_reference(name: str) -> None:
    assert type(make(name, {"down_proj": torch.randn(64, 512)}, BF16)) is Grouped


OLD = SimpleNamespace(check_jit_execution=int, get_host_cpu_features=dict)  # LLVM on a CPU that has nothing


@pytest.mark.parametrize(
    ("place", "instead", "why"),
    [
        ("importlib.util.find_spec", lambda _: None, "llvmlite is not installed"),
        ("_llvm", lambda: OLD, "no AVX2"),
        ("_llvm", lambda: 1 / 0, r"cannot compile here (ZeroDivisionError"),
    ],
)
def test_without_kernels_the_portable_form_serves_and_the_log_says_why(
    place: str, instead: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    parts, x = {"down_proj": torch.randn(6, 128)}, states(2, 128, BF16)
    asked_anew = functools.cache(widths.__wrapped__)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "moestro.kernels"):
        patched.setattr(f"{compile.__name__}.{place}", instead)
        patched.setattr(f"{products.__name__}.widths", asked_anew)
        codecs = [make(name, parts) for name in ("iq4_nl", "int8")]
    assert [why in record.getMessage() for record in caplog.records if record.name == "moestro.kernels"] == [True]
    for codec in codecs:
        assert type(codec) is Grouped and codec.verbatim
        got, weight = codec.linear(slot := fill(codec, parts), "down_proj", x), codec.dequantize(slot, "down_proj")
        assert torch.equal(got, x @ weight.t())


@needs_kernels
def test_every_scale_of_eight_bits_is_torch_s() -> None:
    """Subnormal ones, both signs and NaN, by the kernel that dequantises and by the canonical product."""
    codes = torch.full((256, 32), 2, dtype=torch.uint8)  # 1.0
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 2).contiguous().view(torch.float8_e4m3fn)
    coded = QuantizedTensor("nvfp4", codes, scale, None, torch.ones(256, 1))
    codec = make("nvfp4", {"down_proj": torch.empty(256, 32)}, BF16)
    slot, one = fill(codec, {"down_proj": coded}), matrix(codec, "down_proj")  # type: ignore[arg-type, dict-item]
    wanted = scale.float()[:, :1].expand(-1, 32).bfloat16()
    assert torch.equal(Products(one, BF16).dequantized(slot.at).nan_to_num(-1), wanted.nan_to_num(-1))
    x = torch.zeros(1, 32, dtype=BF16)
    x[0, 0] = 127  # whose scale is 1
    got = CanonicalProducts(one, BF16, torch.float32).many(slot.at, x)[0]
    assert torch.equal(got.nan_to_num(-1), (127 * scale.float()[:, 0]).nan_to_num(-1))
