"""The budget pays for the workspace of passes and for the pieces in which prompts are read, or a load is refused."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.capacity import sizes
from core.capacity.fit import estimate, fit_of
from core.capacity.plan import plan
from core.capacity.sizes import Sizes
from core.engine import Engine
from core.errors import BudgetError, ContextError, ModelError, SettingError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.engine.allocated import peak_bytes
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CHAT = [{"role": "user", "content": "hello there"}]


def spec(model: Path, budget: str, **values: object) -> LoadSpec:
    return LoadSpec.checked(str(model), Settings({"budget": budget}), **values)


def test_the_estimate_is_what_the_load_then_takes(model: Path) -> None:
    for budget in ("50%", "all"):
        fit = estimate(spec(model, budget, context=256))
        engine = Engine.load(spec(model, budget, context=256))
        list(engine.generate(CHAT, Sampling(max_new_tokens=4)))
        memory = engine.memory()
        assert fit.fits
        assert (fit.dense, fit.kv, fit.workspace) == (memory.dense, memory.kv, memory.workspace)
        assert fit.slots * fit.shape.expert_bytes == memory.experts
        assert memory.peak == memory.used == fit.budget
        tensors = {id(t): t for t in (*engine.model.parameters(), *engine.model.buffers())}
        assert memory.dense == sum(t.numel() * t.element_size() for t in tensors.values())
        assert memory.host == fit.host
        engine.unload()


def test_a_budget_too_small_says_how_much_is_needed(model: Path) -> None:
    fit = estimate(spec(model, "20%", context=256))
    assert not fit.fits
    with pytest.raises(BudgetError, match=r"too small.*needs at least .* which is 50 % of its experts"):
        Engine.load(spec(model, "20%", context=256))
    with pytest.raises(BudgetError, match=r"It is .* short"):
        Engine.load(spec(model, "1MB", context=256))
    Engine.load(spec(model, str(fit.budget_min), context=256)).unload()  # exactly what it asked for suffices
    with pytest.raises(BudgetError):
        Engine.load(spec(model, str(fit.budget_min - 1), context=256))


def test_a_budget_over_what_is_free_is_refused(model: Path) -> None:
    with pytest.raises(BudgetError, match=r"asks for 900 TB, but only .* are free"):
        Engine.load(spec(model, "900000GB", context=256))


def test_the_context_is_bounded_by_the_model_and_counted(model: Path) -> None:
    with pytest.raises(ContextError, match="longer than the 512"):
        estimate(spec(model, "50%", context=1024))
    assert estimate(spec(model, "50%", context=512)).kv == 2 * estimate(spec(model, "50%", context=256)).kv


def test_moving_the_budget_moves_memory_and_a_bad_value_changes_nothing(engine: Engine) -> None:
    slots = engine.expert_cache.slots
    engine.change({"budget": "75%"})
    assert len(engine.wiring.arena) == engine.expert_cache.slots == slots * 3 // 2
    before = engine.settings
    for bad, error in (("10%", BudgetError), ("9000GB", BudgetError), ("lots", SettingError), ("120%", SettingError)):
        with pytest.raises(error):
            engine.change({"budget": bad})
        assert engine.settings == before
        assert len(engine.wiring.arena) == slots * 3 // 2
    engine.expert_cache.check_integrity()


def test_a_change_in_mid_answer_acts_from_the_next_token_on(engine: Engine) -> None:
    pieces = []
    for piece in engine.generate(CHAT, Sampling(max_new_tokens=10)):
        pieces.append(piece)
        if sum(p.kind == "token" for p in pieces) == 4:
            engine.change({"budget": "100%", "eviction": "lfu"})
            assert engine.expert_cache.slots == 12  # not yet: a pass owns the cache
    steps = [p.step for p in pieces if p.step is not None]
    assert [s.slots for s in steps] == [12] * 4 + [24] * 6
    assert [s.changes for s in steps if s.changes] == [{"budget": "100%", "eviction": "lfu"}]
    assert all(s.device_bytes <= s.budget_bytes for s in steps)
    assert engine.frame().marks == [(steps[4].index, "budget 50% → 100%"), (steps[4].index, "eviction lru → lfu")]


def test_growing_into_a_full_device_keeps_what_there_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    list(engine.generate(CHAT, Sampling(max_new_tokens=2)))
    allocate, left = engine.wiring.arena.allocate, iter([True, True])

    def two_more(layer: int) -> object:
        if not next(left, False):
            raise RuntimeError("out of memory")
        return allocate(layer)

    monkeypatch.setattr(engine.wiring.arena, "allocate", two_more)
    engine.change({"budget": "100%"})
    monkeypatch.undo()
    assert len(engine.wiring.arena) == engine.expert_cache.slots == 14
    assert engine.settings.cache.budget.bytes == engine.sizes.bytes(14)
    engine.expert_cache.check_integrity()
    list(engine.generate(CHAT, Sampling(max_new_tokens=2)))


@pytest.mark.parametrize(
    "bad",
    [{"nothing": 1}, {"eviction": "mru"}, {"link_gbps": -1}, {"eviction.lcp.omega": 1.5}, {"predictor.width": "many"}],
)
def test_bad_settings_are_refused_by_name(engine: Engine, bad: dict[str, object]) -> None:
    before = engine.settings
    with pytest.raises(SettingError, match=next(iter(bad)).split(".")[-1]):
        engine.change(bad)
    assert engine.settings == before


def test_no_such_model_and_no_such_format(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        Engine.load(spec(tmp_path / "nowhere", "50%"))
    with pytest.raises(SettingError, match="choice"):
        LoadSpec.checked("demo", format="int5")


@pytest.mark.parametrize(("device", "freed"), [("cpu", (7, 7)), ("cuda", (2, 5))])
def test_what_is_loaded_now_counts_as_free_when_it_makes_room(
    model: Path, engine: Engine, device: str, freed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the model and its host copies are in one memory; on a GPU each gives back to its own."""
    monkeypatch.setattr("core.capacity.free_memory.free_bytes", lambda device: (10**9, 10**9))
    planned = plan(spec(model, "50%"))
    loaded = replace(engine.memory(), dense=1, experts=1, kv=0, workspace=0, host=5)
    fit = fit_of(replace(planned, device=torch.device(device)), loaded, forecast=False)
    assert (fit.device_free - 10**9, fit.host_free - 10**9) == freed


STATES = ["granitemoehybrid", "inkling_text", "jamba", "lfm2_moe", "nemotron_h", "qwen3_next"]  # not only keys, values


EVERY = [*sorted(ARCHITECTURES), *STATES]
QUICK = ("qwen3_moe",)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    layered(
        (
            *((arch, ("float32", "bfloat16")[i % 2]) for i, arch in enumerate(EVERY)),  # some in both
            *((arch, ("bfloat16", "float32")[i % 2]) for i, arch in enumerate(EVERY) if arch in ("qwen3_moe", "jamba")),
        ),
        quick=lambda case: case[0] in QUICK and case != ("qwen3_moe", "float32"),
    ),
)
def test_a_full_prefill_chunk_stays_within_the_workspace(arch: str, dtype: str, tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch, max_position_embeddings=1024))
    with loaded(path, {"budget": "all"}, dtype=dtype, context=1000) as engine:
        answered = functools.partial(engine.generate, "x" * 900, Sampling(max_new_tokens=2))
        list(answered())  # the KV cache is allocated by then
        used = peak_bytes(lambda: list(answered()))
        assert used <= engine.sizes.workspace
        assert used >= engine.sizes.workspace / 4, "the bound is so loose that it says nothing"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("pieces"), max_position_embeddings=4096))


def planned(path: Path, budget: str, context: int = 4096) -> Sizes:
    return plan(LoadSpec.checked(str(path), Settings({"budget": budget}), context=context)).sizes


def test_small_experts_pay_for_short_pieces_alone(path: Path) -> None:
    assert planned(path, "100%").chunk == sizes.SHORT_CHUNK
    assert planned(path, "100%", 300).chunk == 300


def test_each_kind_of_budget_has_its_share(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = planned(path, "100%")
    monkeypatch.setattr(sizes, "WORTH_SHARED", 1e6)
    monkeypatch.setattr(sizes, "WORTH_BYTES", 0.0)
    long = planned(path, "100%")
    assert long.chunk == sizes.PREFILL_CHUNK and long.workspace > short.workspace
    assert planned(path, str(short.bytes(short.slots_all))) == short
    monkeypatch.setattr(sizes, "WORTH_SHARED", (long.workspace - short.workspace) / 2 / (short.slots_all * short.slot))
    assert planned(path, "100%").chunk == sizes.PREFILL_CHUNK // 2
    assert planned(path, "50%").chunk < sizes.PREFILL_CHUNK // 2


def test_measuring_keeps_to_short_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "WORTH_SHARED", 1e6)
    with loaded(path, {"budget": "50%"}, context=2048) as engine:
        assert engine.sizes.chunk == 2048
        with engine.workbench("a test") as bench:
            assert bench.chunk == sizes.SHORT_CHUNK
