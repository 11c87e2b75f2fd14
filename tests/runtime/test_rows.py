"""Each product computes a layer's (row, expert, weight) triples as they are defined, with the same bits in whatever
order and batches."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from core.cache.lease import LeasedSegment
from core.engine import Engine
from core.memory.arena import Arena, Slot
from core.memory.codec import Codec, PartSpec, make_codec
from core.memory.codec.layers import LayerCodecs
from core.runtime.expert_math import ExpertMath
from core.runtime.product import Product
from core.runtime.row_places import Places, depends_on_position, gated
from core.runtime.rows import NOTHING, ExpertRows, Routed, compute_all_hits, distinct
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.types import Segment
from tests.architectures.trial import known, random_model, run, save, transformers_own
from tests.checkpoints import make_checkpoint
from tests.equality.passes import plain_transformers
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CASES = [
    (1, "token", 1),
    (1, "prompt", 7),
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
    math = copy(engine.wiring.math[0])
    if name == "blocks":  # in the place of a GPU's kernels

        def few(slots: Sequence[Slot], x: torch.Tensor) -> torch.Tensor:
            return torch.cat([math.down(slot, math.activate(math.up(slot, x))) for slot in slots])

        vars(math)["grouped"] = SimpleNamespace(few=few)
        math.choose()
    product: Product = getattr(math, name)
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
    exact = name != "blocks"  # these sum in fp32 kernels of our own
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


# -- together or one by one --------------------------------------------------------------------------------------------


CPU = torch.device("cpu")
HIDDEN, INNER = 64, 32


def gate(y: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


def build(
    dtype: torch.dtype, transposed: bool, format: str = "checkpoint", bias: bool = False
) -> tuple[ExpertMath, list[Slot]]:
    up, down = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    shapes = {"gate_up_proj": up[::-1] if transposed else up, "down_proj": down[::-1] if transposed else down}
    specs = {name: PartSpec(shape, dtype) for name, shape in shapes.items()}
    codec: Codec = make_codec(format, specs=specs, dtype=dtype, device=CPU, is_transposed=transposed)
    arena, slots = Arena(LayerCodecs.alike(codec, 1, 4), CPU), []
    for seed in range(4):
        random = torch.Generator().manual_seed(seed)
        slot = arena.allocate()
        codec.place(codec.encode({n: torch.randn(s, generator=random) * 0.1 for n, s in shapes.items()}), slot.raw)
        slots.append(slot)
    module = SimpleNamespace(has_gate=True, has_bias=bias, has_post_expert_norm=False, _apply_gate=gate)
    return ExpertMath(module, codec), slots


# -- clamped gates of any width ----------------------------------------------------------------------------------------


def clamped(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=7.0)) * up


def own_rows(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return gate.abs() * up


def test_a_gate_without_exponentials_needs_no_places() -> None:
    assert not depends_on_position(own_rows, 2 * 40, torch.float32)


@pytest.mark.parametrize("width", [8, 32, 40, 48, 56, 96])
@pytest.mark.parametrize("total", [1, 3, 4, 7, 130, 700])
def test_rows_are_computed_in_their_places(width: int, total: int) -> None:
    y = torch.randn(total, 2 * width, generator=torch.Generator().manual_seed(total)) * 3
    whole = clamped(y)
    for start in {0, 1, total // 2, total - 1} & set(range(total)):
        for end in {start + 1, (start + total + 1) // 2, total} - {start}:
            assert torch.equal(gated(clamped, y[start:end], Places(range(start, end), total)), whole[start:end])
    if total < 10:
        for at in ([total - 1], [0], list(range(total))[::-2]):
            assert torch.equal(gated(clamped, y[at], Places(at, total)), whole[at])


@pytest.mark.parametrize(
    ("model_type", "width"),
    layered(
        [("gpt_oss", 32), ("gpt_oss", 40), ("gpt_oss", 48), ("gpt_oss", 56), ("hy_v4", 48)],
        quick=lambda case: case == ("gpt_oss", 40),
    ),
)
def test_any_expert_width_is_exact(model_type: str, width: int, tmp_path: Path) -> None:
    if not known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    field = "intermediate_size" if model_type == "gpt_oss" else "moe_intermediate_size"
    path = save(random_model(model_type, **{field: width}), tmp_path)
    plain = transformers_own(path, torch.float32)
    want = run(plain, DynamicCache(config=plain.config), 8)
    with loaded(path, {"budget": "50%"}, dtype="float32") as engine:
        assert (run(engine.model, engine.fresh_cache(), 8) - want).abs().max().item() == 0.0
