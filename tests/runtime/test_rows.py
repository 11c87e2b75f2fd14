"""Each product computes a layer's (row, expert, weight) triples as they are defined, with the same bits in whatever
order and batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.cache.lease import LeasedSegment
from core.engine import Engine
from core.runtime.expert_math import ExpertMath
from core.runtime.product import Product
from core.runtime.rows import NOTHING, ExpertRows, Routed, compute_all_hits, distinct
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.types import Segment
from tests.checkpoints import make_checkpoint
from tests.equality.passes import plain_transformers
from tests.tiny_tokenizer import save_tokenizer

CASES = [
    (1, "token", 1),
    (1, "prompt", 7),
    (1, "decode", 1),
    (1, "decode", 7),
    (2, "token", 1),
    (2, "blocks", 1),
    (2, "prompt", 7),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("rows")))


@pytest.fixture(scope="module")
def experts(path: Path) -> Any:
    """transformers' own experts of the first layer."""
    return plain_transformers(path, torch.float32).model.layers[0].mlp.experts


@pytest.fixture(scope="module")
def engines(path: Path) -> Iterator[dict[int, Engine]]:
    """All experts are resident, by the number of blocks of each."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        found = {}
        for blocks in sorted({blocks for blocks, _, _ in CASES}):
            spec = LoadSpec.checked(str(path), Settings({"budget": "all"}), dtype="float32", context=64, blocks=blocks)
            found[blocks] = Engine.load(spec)
            stack.callback(found[blocks].unload)
        yield found


def routing(engine: Engine, tokens: int, *, drop: int = 0) -> tuple[torch.Tensor, Routed]:
    """States [T, H] and their routing, of which the first `drop` choices of each token are dropped."""
    shape, drawn = engine.shape, torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, shape.hidden, generator=drawn)
    asked = [torch.randperm(shape.experts, generator=drawn)[: shape.top_k].tolist() for _ in range(tokens)]
    weights = torch.rand(tokens, shape.top_k, generator=drawn)
    chosen = [[NOTHING] * drop + row[drop:] for row in asked] if drop else asked
    return hidden, Routed(torch.tensor(chosen), weights, chosen, distinct(chosen), asked)


def leased(engine: Engine, routed: Routed, *, parts: int = 1) -> list[LeasedSegment]:
    """The wanted experts, each in so many segments."""
    lease = engine.expert_cache.acquire(0, routed.wanted)
    engine.expert_cache.release(lease)  # all are resident, and nothing else is fetched
    return [
        replace(one, segment=Segment(one.segment.eid, range(at, at + size)), slots=one.slots[at : at + size])
        for one in lease.segments
        for size in [len(one.slots) // parts]
        for at in range(0, len(one.slots), size)
    ]


def product_of(engine: Engine, name: str) -> tuple[ExpertMath, Product]:
    math = engine.wiring.math[0]
    product: Product | None = getattr(math, name)
    if product is None:
        pytest.skip("no kernels for this CPU")
    return math, product


Batches = Iterable[Sequence[LeasedSegment]]


def computed(math: ExpertMath, product: Product, given: tuple[torch.Tensor, Routed], batches: Batches) -> torch.Tensor:
    rows = ExpertRows(math, product, *given)
    for batch in batches:
        for some in rows.batches(batch):
            rows.compute(some)
    return rows.combined()


@pytest.mark.parametrize(("blocks", "name", "tokens"), CASES)
@torch.inference_mode()
def test_outputs_are_the_weighted_sums_with_the_same_bits_in_any_order(
    engines: dict[int, Engine], experts: Any, blocks: int, name: str, tokens: int
) -> None:
    engine, drawn = engines[blocks], random.Random(0)
    given = hidden, routed = routing(engine, tokens)
    (math, product), segments = product_of(engine, name), leased(engine, routed)
    want = experts(hidden, routed.ids, routed.weights)
    usual = computed(math, product, given, [segments])
    exact = name != "decode" and name != "blocks"  # these sum in fp32 kernels of our own
    assert torch.equal(usual, want) if exact else torch.allclose(usual, want, rtol=1e-4, atol=1e-5)
    for _ in range(6):
        order = drawn.sample(segments, len(segments))
        assert torch.equal(computed(math, product, given, [order]), usual)
        assert torch.equal(computed(math, product, given, [[one] for one in order]), usual)


@torch.inference_mode()
def test_blocks_give_the_same_bits_however_many_of_them_are_there(engines: dict[int, Engine]) -> None:
    """An expert's first block may be computed long before its second."""
    engine, drawn = engines[2], random.Random(1)
    given = _, routed = routing(engine, 1)
    math, product = product_of(engine, "blocks")
    usual = computed(math, product, given, [leased(engine, routed)])
    parts = leased(engine, routed, parts=2)
    for _ in range(6):
        at = sorted(range(len(parts)), key=lambda at: (at % 2, drawn.random()))  # first blocks before second ones
        for batches in ([[parts[one]] for one in at], [[parts[one] for one in at[:3]], [parts[one] for one in at[3:]]]):
            assert torch.equal(computed(math, product, given, batches), usual)


@torch.inference_mode()
def test_all_hits_are_computed_with_the_bits_of_the_general_way(engines: dict[int, Engine]) -> None:
    engine = engines[1]
    given = hidden, routed = routing(engine, 1)
    math, product = product_of(engine, "token")
    segments, tapped = leased(engine, routed), list[torch.Tensor]()
    brief = compute_all_hits(math, segments, hidden, routed.chosen[0], routed.weights, tapped.append)
    rows = ExpertRows(math, product, *given)
    for one in segments[::-1]:
        rows.compute([one])
    assert torch.equal(rows.combined(tapped.append), brief) and torch.equal(*tapped)


@pytest.mark.parametrize(("blocks", "name", "tokens"), CASES)
@torch.inference_mode()
def test_what_is_dropped_counts_as_zero(
    engines: dict[int, Engine], experts: Any, blocks: int, name: str, tokens: int
) -> None:
    engine = engines[blocks]
    hidden, routed = given = routing(engine, tokens, drop=2)
    math, product = product_of(engine, name)
    segments = leased(engine, routed)
    got = computed(math, product, given, [segments])
    weights = routed.weights.clone()
    weights[:, :2] = 0
    want = experts(hidden, torch.tensor(routed.asked), weights)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
