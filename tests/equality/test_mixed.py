"""Experts whose formats differ by layer and by matrix, as a GGUF file has them: held as they are, and computed as
transformers computes their dequantised weights, whatever is resident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.engine import Engine
from core.importing import forecast_import, import_model
from core.memory.pack import Manifest
from core.memory.pages import page_up
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.native.compile import supported
from tests.equality.fast import load, logits
from tests.equality.passes import PROMPT, run
from tests.gguf_writer.write import make_gguf
from tests.loaded import unloading
from tests.selection import layered
from tests.sources.test_imported import STEPS, theirs
from tests.tiny_tokenizer import save_tokenizer

WIDE = dict(hidden_size=256, moe_intermediate_size=512, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2)
TYPES = {  # by layer: gate, up, down
    "blk.0.": ("Q4_K", "Q4_K", "Q6_K"),
    "blk.1.": ("Q4_K", "Q4_K", "Q4_K"),
    "blk.2.": ("Q5_K", "Q4_K", "Q8_0"),  # gate and up are one matrix
    "blk.3.": ("Q4_K", "Q4_K", "Q6_K"),
}
ROUNDED = 0.05  # of a row of logits, where states are rounded to 8 bits
FORMATS = ("q4_k/q6_k", "q4_k", "q5_k/int8-g32", "q4_k/q6_k")


def mixed(name: str) -> str:
    if "_exps" not in name:
        return "F32"
    gate, up, down = next(types for prefix, types in TYPES.items() if name.startswith(prefix))
    return gate if "gate" in name else up if "up" in name else down


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf("qwen3_moe", tmp_path_factory.mktemp("mixed"), mixed, **WIDE)[1]


@pytest.fixture(scope="module")
def pack(file: Path) -> Path:
    return save_tokenizer(import_model(str(file), file.parent / "pack"))


@pytest.fixture(scope="module")
def wanted(file: Path) -> torch.Tensor:
    """transformers' logits of the dequantised weights."""
    return theirs(file, file.parent / "reference")


def test_every_matrix_is_held_as_it_is(file: Path, pack: Path) -> None:
    manifest = Manifest.load(pack)
    assert (manifest.formats, manifest.format) == (FORMATS, "q4_k+q6_k+q5_k+int8-g32")
    assert len(manifest.kinds) == 3 and manifest.kind_of == (0, 1, 2, 0)
    assert {*manifest.exact.values()} == {"exact codes"}
    found = forecast_import(str(file))
    assert found is not None and {one.error for one in found.conversions} == {0.0}
    assert found.bytes - found.dense_bytes == sum(f.stat().st_size for f in pack.glob("experts-*.bin"))


@pytest.mark.parametrize(
    ("budget", "how"),
    layered(
        [
            ({"budget": "25%"}, {"host": "none"}),
            ({"budget": "50%"}, {"host": "all"}),
            ({"budget": "50%", "scope": "global"}, {"host": "300000"}),
            ({"budget": "50%", "bypass": True}, {"host": "none"}),
            ({"budget": "100%"}, {"host": "none"}),
            ({"budget": "50%"}, {"host": "none", "blocks": 2}),
        ],
        quick=lambda case: case[0] == {"budget": "25%"} or "blocks" in case[1],
    ),
)
def test_logits_are_transformers_own(
    pack: Path, wanted: torch.Tensor, budget: dict[str, object], how: dict[str, object]
) -> None:
    spec = LoadSpec.checked(str(pack), Settings(budget), dtype="float32", context=64, arithmetic="reference", **how)
    with unloading(Engine.load(spec)) as engine:

        def before(step: int) -> None:
            engine.expert_cache.core.now += 1

        found, _ = run(engine.model, engine.fresh_cache(), before, STEPS)
        engine.expert_cache.check_integrity()
        assert 0 < engine.memory().peak <= engine.memory().budget
    assert torch.equal(found, wanted)


@pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
def test_fast_has_the_same_bits_whatever_is_resident(pack: Path, wanted: torch.Tensor) -> None:
    cuts = [len(PROMPT) - 4, 1, 3]
    with unloading(load(pack, dtype="float32")) as engine:
        assert engine.wiring.answering.hooked.program is not None
        found = logits(engine, PROMPT, cuts)
        near = wanted[len(PROMPT) - 1]
        assert (found[-1] - near).norm() < ROUNDED * near.norm()
        for budget in ("50%", "25%"):
            engine.change({"budget": budget})
            assert torch.equal(logits(engine, PROMPT, cuts), found), budget
    for how in ({"host": "none"}, {"host": "none", "blocks": 2}):
        settings = Settings({"budget": "25%", "predictor": "none"})
        spec = LoadSpec.checked(str(pack), settings, dtype="float32", context=128, arithmetic="fast", **how)
        with unloading(Engine.load(spec)) as engine:
            assert torch.equal(logits(engine, PROMPT, cuts), found), how


def test_slots_have_the_size_of_their_layers_experts(pack: Path, wanted: torch.Tensor) -> None:
    """Of all layers' where these share slots; and no budget is exceeded, whatever changes live."""
    budget = {"budget": "50%", "predictor": "none"}
    spec = LoadSpec.checked(
        str(pack), Settings(budget), dtype="float32", context=64, arithmetic="reference", host="none"
    )
    with unloading(Engine.load(spec)) as engine:
        codecs, cache, core = engine.loaded.plan.codecs, engine.expert_cache, engine.expert_cache.core
        pages = [page_up(one.slot_bytes) for one in codecs]
        assert len({*pages}) == 3 and engine.sizes.of_layer == tuple(pages)

        def held() -> list[set[int]]:
            return [{len(slot.raw) for slot in cache.sample(layer, 8)} for layer in range(len(codecs))]

        assert held() == [{size} for size in pages]
        for change in (
            {"scope": "global"},
            {"scope": "layer", "bypass": True},
            {"bypass": False, "budget": "75%", "eviction": "lfu"},
            {"budget": str(engine.sizes.bytes(13))},
        ):
            engine.change(change)
            alike = cache.placement.scope == "global" or cache.placement.transit > 0
            assert held() == [{max(pages)} if alike else {size} for size in pages], change
            free = [slot for pool in core.pools for slot in pool.free]
            slots = [*free, *core.transit, *(slot for slots in core.table for slot in slots)]
            assert engine.wiring.arena.bytes == sum(len(slot.raw) for slot in slots)
            cache.check_integrity()
            found, _ = run(engine.model, engine.fresh_cache(), lambda step: None, STEPS)
            assert torch.equal(found, wanted), change
            memory = engine.memory()
            assert memory.dense + memory.experts + memory.kv_reserved + engine.sizes.workspace <= memory.budget, change
        assert cache.slots in (12, 13)
