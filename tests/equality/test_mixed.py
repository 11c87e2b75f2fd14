"""Experts whose formats differ by layer and by matrix, as GGUF files and compressed-tensors have them: held as they
are, and computed as transformers computes their dequantised weights, whatever is resident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core import __version__
from core.capacity.sizes import PromptPiece
from core.engine import Engine
from core.importing import forecast_import, import_model
from core.importing.job import open_job
from core.memory.pack import Manifest
from core.memory.pages import page_up
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids
from tests.equality.fast import load, logits
from tests.equality.passes import PROMPT, run
from tests.loaded import unloading
from tests.mixed_gguf import FORMATS, make_mixed
from tests.mixed_widths import FORMATS as WIDTHS
from tests.mixed_widths import make_widths
from tests.selection import layered
from tests.sources.test_imported import STEPS, theirs
from tests.tiny_tokenizer import save_tokenizer

ROUNDED = 0.05  # of a row of logits, where states are rounded to 8 bits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def file(made: tuple[Path, Path]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def pack(made: tuple[Path, Path]) -> Path:
    return made[1]


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


def test_a_pack_in_segments(file: Path, pack: Path, wanted: torch.Tensor) -> None:
    """Stored in two blocks, read as a whole; and an import of the same file is known by what it writes."""
    cut = save_tokenizer(import_model(str(file), file.parent / "cut", blocks=2))
    manifest = Manifest.load(cut)
    assert [len(one.segments) for one in manifest.kinds] == [2, 2, 2]
    for path, blocks in ((pack, 1), (cut, 2)):
        with open_job(file, "mixed", "auto", blocks) as job:
            assert job.identity(__version__) == Manifest.load(path).identity
    settings = Settings({"budget": "50%"})
    spec = LoadSpec.checked(str(cut), settings, dtype="float32", context=64, arithmetic="reference", host="none")
    with unloading(Engine.load(spec)) as engine:
        found, _ = run(engine.model, engine.fresh_cache(), lambda step: None, STEPS)
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


@pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
def test_the_host_computes_experts_of_every_layer(pack: Path) -> None:
    """Missing experts in host memory, by threads of their own and by the computing thread, and prefetched ones."""
    settings = Settings({"budget": "100%", "link": "emulated", "link_gbps": 0.05, "predictor": "none"})
    spec = LoadSpec.checked(str(pack), settings, dtype="float32", context=64, arithmetic="fast", host="all")
    with unloading(Engine.load(spec)) as engine:

        def answer() -> tuple[list[int], int, int]:
            pieces = [*engine.generate(Ids(PROMPT), Sampling(max_new_tokens=12, temperature=0.0))]
            steps = [one.step for one in pieces if one.step is not None and one.step.phase == "decode"]
            taken = sum(one.demand_bytes for one in steps)
            return [one.token for one in pieces if one.token is not None], sum(s.host_computed for s in steps), taken

        tokens, hosted, taken = answer()
        assert len(tokens) == 12 and hosted == taken == 0
        for threads, predictor in ((0, "none"), (1, "none"), (1, "gate")):
            host = {"miss_placement": "host", "host_threads": threads}
            engine.change({"budget": "25%", "predictor": predictor} | host)
            engine.expert_cache.start_over()
            found, hosted, taken = answer()
            assert found == tokens and hosted > 0, (threads, predictor)
        engine.change({"miss_placement": "measured"})
        assert answer()[0] == tokens
        engine.change({"miss_placement": "wait", "predictor": "none"})
        engine.expert_cache.start_over()
        found, hosted, taken = answer()
        sizes = {one.blob_bytes for one in engine.loaded.plan.codecs}
        assert found == tokens and hosted == 0 and len(sizes) == 3
        engine.expert_cache.check_integrity()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_long_prompt_borrows_what_slots_leave(pack: Path, scope: str) -> None:
    settings = Settings({"budget": "75%", "predictor": "none", "scope": scope})
    spec = LoadSpec.checked(str(pack), settings, dtype="float32", context=64, arithmetic="reference", host="none")
    with unloading(Engine.load(spec)) as engine:
        controller, arena, slots = engine._controller, engine.wiring.arena, engine.expert_cache.slots
        taken = arena.bytes
        for extra in (1, 230_000, 270_000, 700_000, 1_500_000):
            controller._sizes = replace(engine.sizes, longer=(PromptPiece(1024, extra),))
            assert controller.reserve_workspace(engine.parts, 1024)
            assert arena.bytes + extra <= taken and engine.expert_cache.slots < slots
            engine.expert_cache.check_integrity()
            memory = engine.memory()
            assert memory.dense + memory.experts + memory.kv_reserved + engine.sizes.workspace + extra <= memory.budget
            assert controller.reserve_workspace(engine.parts, 0)
            assert (arena.bytes, engine.expert_cache.slots) == (taken, slots)
        controller._sizes = engine.sizes


@pytest.mark.long(0.1)
def test_widths_of_compressed_tensors(tmp_path: Path) -> None:
    """By matrix and by layer, and a layer in plain numbers, which 8-bit floats are dequantised to."""
    path = save_tokenizer(make_widths(tmp_path, num_experts=8))
    pack = save_tokenizer(import_model(str(path), tmp_path / "pack"))
    manifest = Manifest.load(pack)
    assert manifest.formats == WIDTHS
    assert all("exact codes" in one for one in manifest.exact.values())
    found = forecast_import(str(path))
    assert found is not None and {one.error for one in found.conversions} == {0.0}
    reference = theirs(path, tmp_path / "reference")
    for budget, how in (("25%", {}), ("50%", {"blocks": 2})):
        spec = LoadSpec.checked(
            str(pack), Settings({"budget": budget}), dtype="float32", context=64, arithmetic="reference", **how
        )
        with unloading(Engine.load(spec)) as engine:
            assert torch.equal(run(engine.model, engine.fresh_cache(), lambda step: None, STEPS)[0], reference)
            engine.change({"scope": "global"})
            assert torch.equal(run(engine.model, engine.fresh_cache(), lambda step: None, STEPS)[0], reference)
            engine.expert_cache.check_integrity()
    if supported():
        with unloading(load(pack, dtype="float32")) as engine:
            assert engine.wiring.answering.hooked.program is not None
            whole, near = logits(engine, PROMPT, [len(PROMPT)]), reference[len(PROMPT) - 1]
            assert (whole[-1] - near).norm() < ROUNDED * near.norm()
            for budget, cuts in (("25%", [len(PROMPT)]), ("50%", [len(PROMPT) - 4, 1, 3])):
                engine.change({"budget": budget})
                assert torch.equal(logits(engine, PROMPT, cuts)[-1], whole[-1]), budget
