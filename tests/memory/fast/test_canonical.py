"""The canonical product: every kernel gives the very bits of the portable one, and a row's result is one function of
that row: however many others go along, in whatever order experts come, by however many threads."""

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.memory.codec import FORMATS as DEFINED
from core.memory.codec import ExpertParts, PartSpec, in_blocks
from core.memory.codec.base import Base
from core.memory.codec.fast import choice
from core.memory.codec.fast.choice import Timed
from core.memory.codec.fast.products import LONGEST, ROWS, TILED, TILES, CanonicalProducts, serves
from core.memory.codec.matrix import Matrix, Part, matrix
from core.memory.codec.native.threads import share, shared_by
from core.system.native.compile import supported
from tests.kernel_cases import CODED, FEW
from tests.memory.fast import product_oracle
from tests.memory.fast.cases import PLAIN, case, inputs_of, rows
from tests.selection import examples, layered

FORMATS = layered([*CODED, *PLAIN], quick=(*FEW, "nvfp4", "q4_k", "q3_k", "iq2_s", "bfloat16", "float32").__contains__)
WHOLE = 2e-2  # relative distance from the product of the dequantised weights: x keeps 8 bits of each block
needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")


@pytest.fixture(autouse=True)
def shared_as_before() -> Iterator[None]:
    before = shared_by()
    yield
    share(before)


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("outputs", "blocks"), layered([(24, 12), (7, 3), (16, 11), (40, 16)], lambda case: case == (24, 12))
)
@pytest.mark.parametrize("count", [1, 9])
def test_bits_are_the_portable_ones(format: str, outputs: int, blocks: int, count: int) -> None:
    found, slots, _ = case(format, outputs, inputs_of(format, blocks))
    assert serves(found)
    x = rows(count, found.inputs)
    got = CanonicalProducts(found, x.dtype, torch.float32).many(slots[0].data_ptr(), x)
    assert torch.equal(got, product_oracle.product(found, slots[0], x))


@needs_kernels
@pytest.mark.parametrize(
    "stored", layered([torch.float32, torch.bfloat16, torch.float16], lambda one: one == torch.bfloat16)
)
@pytest.mark.parametrize(
    ("outputs", "inputs"), layered([(24, 96), (7, 20), (1491, 237)], quick=lambda case: case != (7, 20))
)
def test_a_transposed_matrix_has_the_bits_of_the_other(stored: torch.dtype, outputs: int, inputs: int) -> None:
    weights = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).to(stored)
    x, found = rows(5, inputs, torch.float32), []
    for turned in (False, True):
        slot = (weights.t() if turned else weights).contiguous()
        one = Matrix(outputs, inputs, turned, 0, 0, "", Part(0, stored), None, None, None, None)
        assert serves(one)
        found.append(CanonicalProducts(one, x.dtype).many(slot.data_ptr(), x))
        assert torch.equal(found[-1], product_oracle.product(one, slot.view(-1).view(torch.uint8), x))
        assert torch.equal(CanonicalProducts(one, x.dtype).many(slot.data_ptr(), x[2:3]), found[-1][2:3])
    assert torch.equal(*found)


@needs_kernels
@examples(20, fewer=8)
@given(
    format=st.sampled_from(["int4-g64", "mxfp4", "int8", "int3", "q4_k", "iq2_s", "bfloat16"]),
    counts=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    threads=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_a_row_has_the_bits_that_it_has_alone(format: str, counts: list[int], threads: int, order: object) -> None:
    found, slots, _ = case(
        format, *((24, 768) if format in ("int3", "iq2_s") else (512, 1024)), 5
    )  # these compile for seconds
    products = CanonicalProducts(found, torch.bfloat16, torch.float32)
    x = rows(sum(counts), found.inputs)
    chosen = list(range(len(slots)))
    order.shuffle(chosen)  # type: ignore[attr-defined]
    slot_of = [slots[at].data_ptr() for at, _ in zip(itertools.cycle(chosen), counts, strict=False)]
    share(1)
    ends = [0, *itertools.accumulate(counts)]
    wanted = [
        products.many(slot, row[None])
        for slot, first, last in zip(slot_of, ends, ends[1:], strict=False)
        for row in x[first:last]
    ]
    share(threads)
    runs = [(count, [slot]) for count, slot in zip(counts, slot_of, strict=True)]
    assert torch.equal(products.several(runs, x), torch.cat(wanted))


@functools.cache
def cut(
    format: str, inner: int, parts: int, *, turned: bool = False
) -> tuple[Matrix, torch.Tensor, Matrix, torch.Tensor]:
    """The second matrix of an expert and its slot, and the same cut into so many, with a slot (uint8 [bytes]) each."""
    shapes = {"gate_up_proj": (2 * inner, max(64, DEFINED[format].grain)), "down_proj": (24, inner)}
    specs = {name: PartSpec(shape[::-1] if turned else shape, torch.bfloat16) for name, shape in shapes.items()}
    experts = ExpertParts(specs, turned, has_gate=True, is_concatenated=True)
    made = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "stored": None}
    block = in_blocks(format, experts=experts, blocks=parts, **made)
    assert block.whole is not None
    whole, segments = block.whole
    random = torch.Generator().manual_seed(inner)
    slot = whole.encode({name: torch.randn(spec.shape, generator=random).bfloat16() for name, spec in specs.items()})
    assert isinstance(whole, Base) and isinstance(block, Base)
    one = matrix(block, "down_proj")._replace(inputs=inner, blocks=parts)
    return matrix(whole, "down_proj"), slot, one, segments.cut(slot).view(parts, -1)


@needs_kernels
@pytest.mark.parametrize(
    ("format", "inner", "parts", "turned"),
    layered(
        [
            ("int4-g64", 1024, 2, False),  # steps of eight blocks in each slot
            ("int4-g64", 768, 4, False),  # three blocks, which fill vectors
            ("mxfp4", 96, 3, False),  # half a vector
            ("int3", 768, 3, False),
            ("int8", 384, 3, False),  # a scale for each row
            ("nvfp4", 192, 3, False),
            ("q4_k", 1536, 3, False),  # two numbers of 256 inputs in each slot
            ("q6_k", 768, 3, False),
            ("q3_k", 768, 3, False),
            ("tq2_0", 768, 3, False),
            ("bfloat16", 96, 2, False),
            ("bfloat16", 96, 3, True),
        ],
        lambda case: case[0] in ("mxfp4", "bfloat16", "q4_k") or case[1] == 1024,
    ),
)
@pytest.mark.parametrize("count", [1, 9])
def test_a_matrix_in_several_slots_has_the_bits_of_a_whole_one(
    format: str, inner: int, parts: int, turned: bool, count: int
) -> None:
    whole, slot, found, slots = cut(format, inner, parts, turned=turned)
    x = rows(count, inner, torch.float32)
    wanted = CanonicalProducts(whole, x.dtype).many(slot.data_ptr(), x)
    got = CanonicalProducts(found, x.dtype).run([one.data_ptr() for one in slots], x, [count], x.dtype)
    assert torch.equal(got, wanted)
    assert torch.equal(wanted, product_oracle.product(whole, slot, x))


@needs_kernels
@pytest.mark.parametrize("format", ["int4-g64", "bfloat16"])
def test_one_row_for_many_experts(format: str) -> None:
    found, slots, _ = case(format, 512, 1024, 5)
    products, x = CanonicalProducts(found, torch.bfloat16), rows(1, found.inputs)
    at = [slot.data_ptr() for slot in slots]
    got = products.few(at, x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.cat([products.many(one, x) for one in at]))
    exact = CanonicalProducts(found, torch.bfloat16, torch.float32).few(at, x)
    assert torch.equal(exact.bfloat16(), got), "rounded once"


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
def test_near_the_product_of_the_weights(format: str) -> None:
    found, slots, weights = case(format, 24, inputs_of(format, 12))
    x = rows(9, found.inputs)
    got = CanonicalProducts(found, x.dtype, torch.float32).many(slots[0].data_ptr(), x).double()
    wanted = x.double() @ weights.double().t()
    assert (got - wanted).norm() < (WHOLE if format in CODED else 1e-6) * wanted.norm()


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-45, 3e38, -0.0])
@pytest.mark.parametrize("format", ["int4-g64", "mxfp4", "int8", "bfloat16"])
def test_odd_numbers_stay_in_their_row(format: str, value: float) -> None:
    found, slots, _ = case(format, 24, inputs_of(format, 12))  # a shape that is compiled already
    x = rows(5, found.inputs, torch.float32)
    x[2] = value
    products = CanonicalProducts(found, torch.float32)
    got = products.many(slots[0].data_ptr(), x)
    wanted = product_oracle.product(found, slots[0], x)
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], products.many(slots[0].data_ptr(), x[others]))
    assert got[2].isnan().all() or got[2].isfinite().all() or value == 3e38 or format == "bfloat16"


@needs_kernels
def test_the_way_is_the_one_that_was_faster_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_timed", {})
    found, slots, _ = case("int4-g64", 24, 768)
    products, x = CanonicalProducts(found, torch.bfloat16, torch.float32), rows(20, found.inputs)
    wanted = products.many(slots[0].data_ptr(), x)
    assert products.tiled == TILED
    for tiles, first in ((1.0, 2), (8.0, 8), (1e9, LONGEST)):  # tiles take as long for any number of rows
        choice._timed[products.kind] = Timed({ROWS: (4.0, 16.0, 64.0), TILES: (tiles - 0.5,) * 3})
        assert products.tiled == first
        assert torch.equal(products.many(slots[0].data_ptr(), x), wanted)


@needs_kernels
def test_both_ways_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_timed", {})
    found, _, _ = case("int4-g64", 512, 1024)
    products = CanonicalProducts(found, torch.float32)
    products.choose(1)
    timed = choice.timed(products.kind)
    assert timed is not None and set(timed.seconds) == {ROWS, TILES}
    products.choose(1)
    assert choice.timed(products.kind) is timed


def test_fma_rounds_once() -> None:
    """Where rounding the sum to fp64 first would give another number."""
    a, b = torch.tensor([1.0 + 2**-12]), torch.tensor([1.0 + 2**-12])
    # a * b = 1 + 2^-11 + 2^-24: half way between two numbers of fp32, and c decides far below fp64's last bit
    assert product_oracle.fma(a, b, torch.tensor([2.0**-80])).item() == 1 + 2**-11 + 2**-23
    assert product_oracle.fma(a, b, torch.tensor([-(2.0**-80)])).item() == 1 + 2**-11
