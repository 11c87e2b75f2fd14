"""Products of many states in bfloat16: torch's own bits out of plain numbers, and as near to the exact ones out of
codes; whoever computes a row, and however many states there are."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from core.memory.codec.formats import format_of
from core.memory.codec.matrix import Matrix
from core.memory.codec.native import panels, tile_products
from core.memory.codec.native.choice import TILES
from core.memory.codec.native.threads import TORCHS, share, shared_by
from core.memory.codec.native.tile_products import ExactTiles, TileProducts, by_onednn, serves
from core.system.native.compile import multiplies_pairs, widths
from tests.kernel_cases import FEW
from tests.memory.test_codec import relative
from tests.memory.test_native import CODED, case, inputs_of
from tests.memory.test_native import states as random_states
from tests.memory.test_plain_products import FIRST, described, slots
from tests.selection import layered

BF16 = torch.bfloat16
SHAPES = [(64, 32), (128, 96), (192, 768), (1024, 512), (64, 2048)]
needs_kernels = pytest.mark.skipif(not widths(), reason="no kernels for this CPU")
needs_panels = pytest.mark.skipif(multiplies_pairs(), reason="this CPU multiplies pairs of bfloat16 instead")
needs_pairs = pytest.mark.skipif(not multiplies_pairs(), reason="this CPU does not multiply pairs of bfloat16")


@pytest.fixture(autouse=True)
def shared_as_before() -> Iterator[None]:
    before, threads = shared_by(), torch.get_num_threads()
    yield
    share(before)
    torch.set_num_threads(threads)


def held(outputs: int, inputs: int) -> tuple[Matrix, torch.Tensor, torch.Tensor]:
    """A matrix, a slot with it, and its numbers."""
    (slot,) = slots(1, outputs, inputs, BF16)
    return described(outputs, inputs, BF16), slot, slot[FIRST:].view(BF16).view(outputs, inputs)


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_are_torchs_or_torch_computes(outputs: int, inputs: int) -> None:
    matrix, slot, weights = held(outputs, inputs)
    if not serves(matrix, BF16):
        return
    tiles = ExactTiles(matrix)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        share(TORCHS)
        for count in (2, 3, 6, 7, 17, 64, 241):
            x = random_states(count, inputs, BF16)
            found = tiles.many(slot.data_ptr(), x)
            assert found is None or torch.equal(found, torch.mm(x, weights.t()))
            assert found is not None or by_onednn() or torch.backends.cpu.get_cpu_capability() != "AVX2"


@needs_pairs
def test_a_trial_tells_orders_of_additions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tile_products._cancelling(tile_products.MANY, 1024, 1)[:5]
    weights = tile_products._cancelling(64, 1024, -1)
    matrix = described(64, 1024, BF16)
    one, other = (TileProducts(matrix, span).many(weights.data_ptr() - FIRST, x) for span in (64, 128))
    assert (one != other).float().mean() > 0.5
    monkeypatch.setattr(torch, "mm", lambda *_: one)
    monkeypatch.setattr(ExactTiles, "_found", {})
    assert ExactTiles(matrix).many(weights.data_ptr() - FIRST, x) is None, "none of the orders that are tried"
    monkeypatch.setattr(tile_products, "SPANS", (64,))
    assert ExactTiles(matrix).many(weights.data_ptr() - FIRST, x) is None, "the trial is over, for every such matrix"
    ExactTiles._found.clear()
    found = ExactTiles(matrix).many(weights.data_ptr() - FIRST, x)
    assert found is not None and torch.equal(found, one)
    more = x.new_ones(tile_products.MANY + 1, 1024)
    assert ExactTiles(matrix).many(weights.data_ptr() - FIRST, more) is None, "a trial of every number takes too long"


@needs_pairs
@pytest.mark.parametrize("name", layered(CODED, quick=lambda name: name in FEW))
def test_codes_are_as_near_as_their_numbers_in_bfloat16(name: str) -> None:
    inputs = max(inputs_of(name), 1024)
    made = case(name, 128, inputs, BF16, 0)
    for count in (1, 5, 25, 250):
        x = random_states(count, inputs, BF16)
        numbers = made.products.dequantized(made.at[1])
        want = x.double() @ numbers.double().t()
        got = made.products.ways[TILES](made.at[1], x)
        assert relative(got, want) <= relative(want.to(BF16), want) + 2.0**-12


@needs_kernels
@needs_panels
@pytest.mark.parametrize(
    ("name", "dtype"),
    layered(
        itertools.product(CODED, (BF16, torch.float16)),
        quick=lambda case: case == ("int3", BF16),  # other codes: test_canonical.py
    ),
    ids=str,
)
def test_panels_add_the_products_of_each_row_in_the_order_of_inputs(name: str, dtype: torch.dtype) -> None:
    group = max(64, format_of(name).group)
    for inputs in (group, panels.SPAN + group):
        made = case(name, 48, inputs, dtype, 0)
        x = random_states(250, inputs, dtype)
        got = made.products.ways[TILES](made.at[1], x)
        made.near(got, x.double() @ made.weights[1].t())
        if not made.products.matrix.table:  # whose numbers are rounded
            sums = torch.zeros(len(x), 48)
            for i in range(inputs):
                sums = (sums.double() + x[:, i, None].double() * made.weights[1][:, i]).float()
            assert torch.equal(got, sums.to(dtype))
        for count in (1, 3, 8, 9, 16, 17, 33, 241):
            assert torch.equal(made.products.ways[TILES](made.at[1], x[:count]), got[:count])
        for threads, shared in ((1, TORCHS), (2, TORCHS), (3, TORCHS), (2, 1), (2, 2)):
            torch.set_num_threads(threads)
            share(shared)
            assert torch.equal(made.products.ways[TILES](made.at[1], x), got)


@needs_kernels
def test_a_row_is_the_same_beside_any_others_and_from_any_threads() -> None:
    matrix, slot, _ = held(1024, 512)
    tiles, x = TileProducts(matrix, 256), random_states(500, 512, BF16)
    every = tiles.many(slot.data_ptr(), x)
    for threads, shared in ((1, TORCHS), (2, TORCHS), (3, TORCHS), (2, 1), (2, 2)):
        torch.set_num_threads(threads)
        share(shared)
        assert torch.equal(tiles.many(slot.data_ptr(), x), every)
    for at in (0, 5, 6, 239, 240, 499):
        assert torch.equal(tiles.many(slot.data_ptr(), x[at : at + 1]), every[at : at + 1])
    assert torch.equal(tiles.many(slot.data_ptr(), x.view(5, 100, 512)), every.view(5, 100, 1024))


@needs_kernels
def test_which_matrices_are_served() -> None:
    assert serves(described(64, 64, BF16), BF16)
    assert not serves(described(65, 64, BF16), BF16) and not serves(described(64, 48, BF16), BF16)
    assert not serves(described(64, 64, BF16, transposed=True), BF16)
    assert not serves(described(64, 64, torch.float32), torch.float32)
    large = case("int4-g64", 64, 1024, BF16, 0).products.matrix
    assert serves(large, BF16) and not serves(large._replace(inputs=1 << 15), BF16), "its rows would not fit a stack"
