"""The budget is held against what torch reserves, with what its products need for themselves; slots waste little."""

from pathlib import Path

import pytest
import torch

from core.capacity.plan import plan
from core.capacity.sizes import PREFILL_CHUNK
from core.errors import BudgetError
from core.memory.arena import Arena
from core.memory.codec import PartSpec, make_codec
from core.memory.codec.layers import LayerCodecs
from core.memory.slabs import SEGMENT, SLAB_BYTES, slab_slots, slot_cost
from core.memory.slot import Slot
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.cuda.conftest import CONTEXT, engine_on
from tests.fake_cuda import FakeCuda
from tests.fake_cuda.memory import MIB
from tests.selection import layered

pytestmark = pytest.mark.usefixtures("whole_trials")
GPU = torch.device("cuda")
SLOTS = (  # bytes of a slot
    2654208,  # Qwen3-30B-A3B int4-g64
    3538944,  # OLMoE int4-g64
    6488064,  # OLMoE int8-g64
    8660480,  # DeepSeek-V2-Lite int8
    99090432,  # Mixtral 8x7B int4-g64
    64,
)


@pytest.mark.parametrize("budget", layered(["45%", "100%"], quick=lambda budget: budget == "45%"))
def test_what_is_reserved_stays_within_the_budget(fake_cuda: FakeCuda, model: Path, budget: str) -> None:
    fake_cuda.tensors.product_bytes = 96 * MIB  # more than was reckoned with
    with engine_on(model, {"budget": budget, "eviction": "lru"}) as engine:
        steps = [p.step for p in engine.generate("hello " * 20, Sampling(max_new_tokens=8), reuse=True) if p.step]
        assert all(0 < step.device_bytes <= step.budget_bytes for step in steps)
        memory = engine.memory()
        assert fake_cuda.memory.reserved <= memory.used <= memory.budget
        assert memory.workspace > 96 * MIB
        engine.change({"budget": "30%"})
        steps = [p.step for p in engine.generate("hello", Sampling(max_new_tokens=8)) if p.step]
        assert all(step.device_bytes <= step.budget_bytes for step in steps)
        assert fake_cuda.memory.reserved <= engine.memory().budget


@pytest.mark.long(0.1)
def test_a_budget_in_bytes_pays_for_what_products_need(fake_cuda: FakeCuda, model: Path) -> None:
    fake_cuda.tensors.product_bytes = 8 * MIB
    with engine_on(model, {"budget": "120MB", "eviction": "lru"}) as engine:
        steps = [p.step for p in engine.generate("hello", Sampling(max_new_tokens=8)) if p.step]
        assert all(step.device_bytes <= step.budget_bytes <= 120e6 for step in steps)
    fake_cuda.tensors.product_bytes = 128 * MIB
    with pytest.raises(BudgetError, match="budget 120 MB is too small"), engine_on(model, {"budget": "120MB"}):
        pass
    assert fake_cuda.pinned.used == 0


@pytest.mark.long(0.1)  # test_capture_failures.py goes on without graphs for which there is no room
def test_a_budget_without_room_for_graphs_is_served_without(fake_kernels: FakeCuda, model: Path) -> None:
    """By default; where they are asked for by name it is refused."""
    with engine_on(model, {"budget": "100%", "predictor": "none"}) as engine:
        assert engine.sizes.graphs > 0 and engine.parts.device_decode.graphs is not None
        least = engine.sizes.bytes(engine.sizes.slots_min("layer")) + MIB
    chosen: dict[str, object] = {"budget": str(least), "predictor": "none"}
    with engine_on(model, chosen) as engine:
        assert engine.sizes.graphs == 0
        steps = [p.step for p in engine.generate("hello", Sampling(max_new_tokens=8)) if p.step]
        assert all(step.device_bytes <= step.budget_bytes <= least for step in steps)
    with pytest.raises(BudgetError, match="too small"), engine_on(model, {**chosen, "gpu_decode": "graph"}):
        pass


@pytest.mark.long(0.1)
def test_the_kernels_run_before_the_first_answer(
    fake_cuda: FakeCuda, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt as long as passes are, and a token: what an answer would have to compile is compiled by then."""
    from core.runtime.pipeline import Pipeline

    passes: list[tuple[str, int]] = []
    forward = Pipeline.forward

    def noted(self: Pipeline, batch: object, *args: object, **values: object) -> torch.Tensor:
        passes.append((batch.phase, batch.size))  # type: ignore[attr-defined]
        return forward(self, batch, *args, **values)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "forward", noted)
    with engine_on(model, {"budget": "45%"}):
        sizes = plan(LoadSpec.checked(str(model), Settings({"budget": "45%"}), device="cuda", context=CONTEXT)).sizes
        assert passes == [("prefill", min(sizes.chunk, PREFILL_CHUNK, CONTEXT - 1)), ("decode", 1)]


# ---------------------------------------------------------------------------------------------------- slots in slabs


@pytest.mark.parametrize("slot_bytes", SLOTS)
def test_a_slab_leaves_little_of_its_segment_unused(slot_bytes: int) -> None:
    count, cost = slab_slots(slot_bytes), slot_cost(slot_bytes)
    assert count * slot_bytes <= max(SLAB_BYTES, slot_bytes)
    assert cost * count >= -(-count * slot_bytes // SEGMENT) * SEGMENT  # what torch reserves is counted
    assert cost <= max(1.02 * slot_bytes, 256)


def arena() -> Arena:
    """Slots of 1.5 MiB: each alone would share a segment of 20 MiB with twelve others, and leave a tenth of it."""
    specs = {"down_proj": PartSpec((768, 1024), torch.float16)}
    codec = make_codec("checkpoint", specs=specs, dtype=torch.float16, device=GPU)
    return Arena(LayerCodecs.alike(codec, 1, 100), GPU)


def filled(arena: Arena, count: int) -> list[Slot]:
    arena.expect(len(arena) + count)
    slots = [arena.allocate() for _ in range(count)]
    for slot in slots:
        slot.raw.fill_(slot.index % 251)
    return slots


def holds(slots: list[Slot]) -> bool:
    return all(bool((slot.raw.cpu() == slot.index % 251).all()) for slot in slots)


def settled() -> None:
    """Nothing is copied."""


def test_slots_take_what_they_are_said_to(fake_cuda: FakeCuda) -> None:
    own = arena()
    slots = filled(own, 100)
    assert own.bytes == 100 * slot_cost(own.codecs.slot_bytes)
    assert 150 * MIB <= fake_cuda.memory.reserved <= own.bytes + 20 * MIB
    assert fake_cuda.memory.reserved <= 1.02 * 150 * MIB
    assert holds(slots)


@pytest.mark.long(0.1)
def test_freed_slots_are_given_back_by_moving_others(fake_cuda: FakeCuda) -> None:
    own = arena()
    slots = filled(own, 100)
    gone, kept = slots[::2], slots[1::2]
    for slot in gone:
        own.free(slot)
    own.pack(settled)
    assert own.bytes == 50 * slot_cost(own.codecs.slot_bytes)
    assert fake_cuda.memory.reserved <= own.bytes + 2 * MIB
    assert holds(kept) and all(slot.raw.numel() == 0 for slot in gone)  # who kept a freed slot keeps no memory
    for slot in kept[1:]:
        own.free(slot)
    own.pack(settled)
    assert own.bytes == slot_cost(own.codecs.slot_bytes) and holds(kept[:1])
    own.free(kept[0])
    own.pack(settled)
    assert own.bytes == 0 and fake_cuda.memory.reserved == 0


def test_slots_that_are_copied_into_are_moved_once_that_is_over(fake_cuda: FakeCuda) -> None:
    own = arena()
    slots = filled(own, 40)
    for slot in slots[:-2]:
        own.free(slot)
    slots[-1].raw.fill_(0)
    own.pack(lambda: slots[-1].raw.fill_(slots[-1].index % 251))
    assert own.bytes == 2 * slot_cost(own.codecs.slot_bytes) and holds(slots[-2:])


def test_a_full_device_keeps_its_slots_where_they_are(fake_cuda: FakeCuda) -> None:
    own = arena()
    slots = filled(own, 20)
    fake_cuda.memory.taken = fake_cuda.memory.available
    own.free(slots.pop(3))
    own.pack(settled)
    assert holds(slots)
    (new,) = filled(own, 1)
    assert holds([*slots, new])
