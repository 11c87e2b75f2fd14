"""Matrices of codes in plain numbers, by native code: the very bits of torch's operations."""

import functools
import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from core.memory.codec import FORMATS, Numbers, SlotParts
from core.memory.codec.coded import QuantizedTensor
from core.memory.codec.fast import dequantize
from core.memory.codec.fast.dequantize import dequantized, serves
from core.memory.codec.fast.products import CanonicalProducts
from core.memory.codec.grouped import Grouped
from core.memory.codec.matrix import Matrix, matrix
from core.memory.codec.measure import fill
from core.system.native import compile
from core.system.native.compile import supported
from tests.kernel_cases import FEW
from tests.logged import Logged
from tests.memory.test_codec import HALF, gpt_oss_like, make, reference, relative
from tests.memory.test_codec_coded import codes_like
from tests.selection import layered

CODED = [n for n in FORMATS if not FORMATS[n].is_plain]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


class Case(NamedTuple):
    codec: Grouped
    matrix: Matrix
    slot: SlotParts

    @property
    def wanted(self) -> torch.Tensor:
        return self.codec.weight("down_proj", self.slot.weights["down_proj"])


def case(name: str, outputs: int, inputs: int, dtype: torch.dtype, stored: Numbers | None = None) -> Case:
    coded = codes_like(name, torch.empty(outputs, inputs), False, 1)
    codec = make(name, {"down_proj": torch.empty(outputs, inputs)}, dtype, stored=stored)
    assert isinstance(codec, Grouped)
    return Case(codec, matrix(codec, "down_proj"), fill(codec, {"down_proj": coded}))  # type: ignore[dict-item]


def inputs_of(name: str) -> int:
    return 1280 if FORMATS[name].wide else 1152 if FORMATS[name].group == 128 else 1088


@pytest.mark.parametrize("name", layered(CODED, quick=lambda name: name in FEW or name == "nf4"))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@needs_kernels
def test_every_weight_has_torch_s_bits(name: str, dtype: torch.dtype) -> None:
    made = case(name, 7, inputs_of(name), dtype)
    assert torch.equal(dequantized(made.matrix, made.slot.at, dtype), made.wanted)
    x = torch.randn(3, inputs_of(name)).to(dtype)
    assert torch.equal(made.codec.linear(made.slot, "down_proj", x), x @ made.wanted.t())


@pytest.mark.parametrize("name", layered(["int8", "int4-g32", "int3", "iq4_nl"], quick="int4-g32".__eq__))
@pytest.mark.parametrize(
    "stored",
    [Numbers(BF16, FP16, FP16), Numbers(BF16, FP32, FP32), Numbers(FP16, FP16, FP32)],
    ids=["fp16", "fp32", "both"],
)
@needs_kernels
def test_numbers_of_a_blob_may_have_another_type(name: str, stored: Numbers) -> None:
    made = case(name, 2, 192, BF16, stored)
    assert torch.equal(dequantized(made.matrix, made.slot.at, BF16), made.wanted)


@needs_kernels
def test_kept_memory_is_the_next_one_s_and_fresh_memory_is_not() -> None:
    one, other = case("int8", 8, 64, BF16), case("int4-g32", 8, 64, BF16)
    kept, fresh = (dequantized(one.matrix, one.slot.at, BF16, fresh=fresh) for fresh in (False, True))
    dequantized(other.matrix, other.slot.at, BF16, fresh=False)
    assert torch.equal(fresh, one.wanted) and torch.equal(kept, other.wanted)


@needs_kernels
def test_exponents_from_the_smallest_to_no_number() -> None:
    made = case("mxfp4", 6, 96, BF16)
    made.slot.weights["down_proj"][1].copy_(
        torch.tensor([[0] * 3, [0, 1, 0], [1, 2, 3], [127] * 3, [130, 255, 1], [255] * 3])
    )
    got = dequantized(made.matrix, made.slot.at, BF16)
    assert bool(got[5].isnan().all()) and float(got[0].float().abs().max()) <= 6 * 2.0**-127
    torch.testing.assert_close(got, made.wanted, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_every_scale_of_eight_bits_is_torch_s() -> None:
    """Subnormal ones, both signs and NaN, by the kernel that dequantises and by the canonical product."""
    codes = torch.full((256, 32), 2, dtype=torch.uint8)  # 1.0
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 2).contiguous().view(torch.float8_e4m3fn)
    coded = QuantizedTensor("nvfp4", codes, scale, None, torch.ones(256, 1))
    codec = make("nvfp4", {"down_proj": torch.empty(256, 32)}, BF16)
    slot, one = fill(codec, {"down_proj": coded}), matrix(codec, "down_proj")  # type: ignore[arg-type, dict-item]
    wanted = scale.float()[:, :1].expand(-1, 32).bfloat16()
    assert torch.equal(dequantized(one, slot.at, BF16).nan_to_num(-1), wanted.nan_to_num(-1))
    x = torch.zeros(1, 32, dtype=BF16)
    x[0, 0] = 127  # whose scale is 1
    got = CanonicalProducts(one, BF16, torch.float32).many(slot.at, x)[0]
    assert torch.equal(got.nan_to_num(-1), (127 * scale.float()[:, 0]).nan_to_num(-1))


@pytest.mark.parametrize("name", layered(["int8", "int4-g64", "nf4", "mxfp4", "int2"], quick="int8".__eq__))
def test_a_codec_multiplies_as_the_model_stores_it_and_without_biases(name: str) -> None:
    parts = gpt_oss_like()
    codec = make(name, parts, FP16, True, HALF)
    assert not codec.verbatim and make(name, parts, FP16, True).verbatim  # biases are bf16 in blobs, fp16 in slots
    slot = fill(codec, parts)
    for part, inputs in (("gate_up_proj", 256), ("down_proj", 256)):
        for count in (1, 7, 40):
            x = torch.randn(count, inputs).half()
            assert relative(codec.linear(slot, part, x), reference(codec, slot, part, x, True)) < 1e-3
        assert codec.linear(slot, part, x[:0]).shape == (0, codec.out_in(part)[0])


OLD = SimpleNamespace(check_jit_execution=int, get_host_cpu_features=dict)  # LLVM on a CPU that has nothing


@pytest.mark.parametrize(
    ("place", "instead", "why"),
    [
        ("importlib.util.find_spec", lambda _: None, "llvmlite is not installed"),
        ("_llvm", lambda: OLD, "no AVX2"),
        ("_llvm", lambda: 1 / 0, r"cannot compile here (ZeroDivisionError"),
    ],
)
def test_without_kernels_torch_computes_and_the_log_says_why(
    place: str, instead: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    parts, x = {"down_proj": torch.randn(6, 128)}, torch.randn(2, 128).bfloat16()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "moestro.kernels"):
        patched.setattr(f"{compile.__name__}.{place}", instead)
        patched.setattr(dequantize, "supported", functools.cache(supported.__wrapped__))
        for name in ("iq4_nl", "int8"):
            codec = make(name, parts)
            assert isinstance(codec, Grouped) and not serves(matrix(codec, "down_proj"))
            slot = fill(codec, parts)
            assert torch.equal(codec.linear(slot, "down_proj", x), x @ codec.dequantize(slot, "down_proj").t())
    assert [why in record.getMessage() for record in caplog.records if record.name == "moestro.kernels"] == [True]
