"""An expert pack under the engine: every tier gives the same logits, disk misses are counted apart, damage is found."""

import itertools
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.capacity.fit import HOST_MARGIN, estimate
from core.capacity.forecast import Seen
from core.engine import Engine
from core.errors import BudgetError, SettingError
from core.hf.cached_pass import cached_pass
from core.importing import import_model
from core.memory.pack import PackReader
from core.memory.store import Cancelled
from core.profile import buddies
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Outcome, Residence
from tests.checkpoints import make_checkpoint
from tests.engine.profiles import drawn_profile
from tests.logged import Logged
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CHAT = [{"role": "user", "content": "the cat sat on the mat and the dog"}]


def load(path: Path, budget: str = "50%", **choices: object) -> Engine:
    return Engine.load(
        LoadSpec.checked(str(path), Settings({"budget": budget, "eviction": "lru"}), context=256, **choices)
    )


def make_model(directory: Path) -> Path:
    """A checkpoint in bfloat16 with 16 experts a layer and a tokenizer."""
    return save_tokenizer(make_checkpoint("qwen3_moe", directory, dtype=torch.bfloat16, num_experts=16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def packs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packs")
    return {
        "whole": import_model(str(model), folder / "whole"),
        "split": import_model(str(model), folder / "split", blocks=2),
        "int4": import_model(str(model), folder / "int4", format="int4-g32"),
    }


def logits(engine: Engine) -> torch.Tensor:
    cache, found = engine.fresh_cache(), []
    with torch.inference_mode():
        for ids in ([[1, 7, 42, 99, 5, 23, 80, 3]], [[11]], [[12]], [[200]]):
            engine.expert_cache.core.now += 1
            found.append(cached_pass(engine.model, torch.tensor(ids), cache).logits[0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    engine = load(model, "all")
    found = logits(engine)
    engine.unload()
    return found


@pytest.mark.parametrize(
    ("pack", "host", "budget"),
    layered(
        [
            ("whole", "none", "all"),
            ("whole", "none", "50%"),
            ("whole", "none", "25%"),
            ("whole", "all", "25%"),
            ("whole", "200kB", "25%"),
            ("split", "none", "all"),
            ("split", "none", "25%"),
            ("split", "200kB", "25%"),
        ],
        quick=lambda case: case == ("split", "200kB", "25%"),
    ),
)
def test_tiers_agree(packs: dict[str, Path], expected: torch.Tensor, pack: str, host: str, budget: str) -> None:
    engine = load(packs[pack], budget, host=host)
    assert torch.equal(logits(engine), expected)
    engine.expert_cache.check_integrity()
    engine.unload()


@pytest.mark.long(0.1)
def test_a_pack_in_4_bits_is_the_checkpoint_loaded_in_4_bits(model: Path, packs: dict[str, Path]) -> None:
    pack, plain = load(packs["int4"]), load(model, format="int4-g32")
    assert torch.equal(logits(pack), logits(plain))
    assert pack.manifest()["format"] == plain.manifest()["format"] == "int4-g32"
    assert pack.manifest()["misses_from"] == "disk" and plain.manifest()["misses_from"] == "host memory"
    pack.unload()
    plain.unload()


@pytest.fixture
def engine(packs: dict[str, Path]) -> Iterator[Engine]:
    engine = load(packs["whole"], "37.5%")
    yield engine
    engine.unload()


def test_misses_from_disk_are_counted_apart(engine: Engine) -> None:
    reader = engine.loaded.store._reader  # type: ignore[attr-defined]
    before = reader.bytes_read
    pieces = list(engine.generate(CHAT, Sampling(max_new_tokens=24)))
    steps = [p.step for p in pieces if p.kind != "end" and p.step is not None] + [pieces[-1].step]
    steps = list({s.index: s for s in steps if s is not None}.values())
    missed = sum(s.disk_misses for s in steps)
    assert missed > 0
    assert not any((s.outcome == Outcome.MISS).any() for s in steps)
    assert sum(s.disk_bytes for s in steps) == missed * reader.padded_bytes == reader.bytes_read - before
    stats = pieces[-1].stats
    assert (stats.disk_misses, stats.disk_bytes) == (missed, missed * reader.padded_bytes)
    assert {t.origin for s in steps for t in s.transfers} == {"disk"}
    place = engine.frame().place
    assert set(np.unique(place)) <= {Residence.DISK, Residence.RESIDENT, Residence.HIT_NOW}
    assert int((place == Residence.DISK).sum()) == engine.shape.total - engine.expert_cache.slots


@pytest.mark.long(0.1)
def test_misses_from_a_host_cache_come_from_both(packs: dict[str, Path]) -> None:
    engine = load(packs["whole"], "25%", host="200kB")
    pieces = list(engine.generate(CHAT, Sampling(max_new_tokens=40)))
    outcomes = np.concatenate([p.step.outcome for p in pieces if p.step is not None])
    assert {Outcome.MISS, Outcome.MISS_DISK} <= set(outcomes.tolist())
    assert {Residence.HOST, Residence.DISK} <= set(np.unique(engine.frame().place).tolist())
    assert 0 < engine.memory().host <= 200_000
    engine.unload()


@pytest.mark.long(0.1)
def test_the_policy_of_the_host_cache_acts_at_once(packs: dict[str, Path]) -> None:
    with PackReader(packs["whole"]) as reader:
        engine = load(packs["whole"], "25%", host=str(20 * reader.padded_bytes))  # room for 20 of the 24 experts

    def from_disk() -> float:
        """Share of the misses of an answer that the disk had to serve."""
        steps = [p.step for p in engine.generate(CHAT, Sampling(max_new_tokens=24)) if p.kind == "token" and p.step]
        missed = sum(int((s.outcome == Outcome.MISS).sum()) for s in steps)
        return sum(s.disk_misses for s in steps) / (missed + sum(s.disk_misses for s in steps))

    from_disk()
    assert from_disk() < 0.5
    engine.change({"host_eviction": "none"})  # what host memory holds is used once, and nothing stays from now on
    from_disk()
    assert from_disk() > 0.9
    engine.change({"host_eviction": "lfu"})
    from_disk()
    assert from_disk() < 0.5
    engine.unload()


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    ("pack", "budget"),
    layered(itertools.product(("whole", "int4"), ("25%", "50%", "all")), quick=lambda case: case == ("int4", "25%")),
)
def test_the_estimate_is_what_the_load_then_takes(packs: dict[str, Path], pack: str, budget: str) -> None:
    spec = LoadSpec.checked(str(packs[pack]), Settings({"budget": budget}), context=256)
    fit, engine = estimate(spec), load(packs[pack], budget)
    list(engine.generate(CHAT, Sampling(max_new_tokens=8)))
    memory = engine.memory()
    measured = memory.dense + memory.experts + memory.kv_reserved + memory.workspace
    assert abs(fit.budget - measured) <= 0.05 * measured
    assert fit.slots == engine.expert_cache.slots
    assert memory.host <= fit.host
    read = engine.loaded.store._reader.padded_bytes  # type: ignore[attr-defined]
    assert fit.disk == (0 if budget == "all" else engine.shape.total * read), "nothing is read where all are resident"
    assert 0 < fit.tok_s_low <= fit.tok_s_high
    assert 0 <= fit.hit_low <= fit.hit_high <= 1
    assert fit.format == ("int4-g32" if pack == "int4" else "checkpoint")
    engine.unload()


@pytest.mark.long(0.1)
def test_a_recorded_trace_narrows_the_forecast(packs: dict[str, Path], engine: Engine) -> None:
    steps = [p.step for p in engine.generate(CHAT, Sampling(max_new_tokens=60)) if p.step is not None]
    decode = [s for s in steps if s.phase == "decode"]
    trace = np.concatenate([s.ids for s in decode], axis=1).transpose(1, 0, 2)
    spec = LoadSpec.checked(str(packs["whole"]), Settings({"budget": "37.5%"}), context=256)
    told = estimate(spec, seen=Seen(trace=trace))
    hits, requests = sum(s.hits for s in decode[15:]), sum(s.requests for s in decode[15:])
    assert told.hit_low == told.hit_high == pytest.approx(hits / requests, abs=0.05)
    assert "recorded tokens" in told.basis
    for few in range(4):  # as after an answer that was stopped at once
        assert "improves after a few answers" in estimate(spec, seen=Seen(trace=trace[:few])).basis


def test_more_host_memory_than_is_free_is_refused(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LoadSpec.checked(str(packs["whole"]), Settings({"budget": "50%"}), context=256)
    free = estimate(spec).budget + HOST_MARGIN
    monkeypatch.setattr("core.capacity.free_memory.free_bytes", lambda device: (free, 10**12))
    assert estimate(spec).fits
    with pytest.raises(BudgetError, match="host memory"):
        load(packs["whole"], host="all")


def test_a_cancelled_load_of_a_pack_keeps_nothing(packs: dict[str, Path]) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        Engine.load(LoadSpec.checked(str(packs["whole"]), Settings({"budget": "all"}), host="all"), cancel=cancel)
    shutil.rmtree(shutil.copytree(packs["whole"], packs["whole"].with_name("moved")))


@pytest.mark.long(0.1)
def test_turning_knobs_while_it_reads_from_disk(engine: Engine, expected: torch.Tensor) -> None:
    for turn in ({"budget": "25%"}, {"scope": "global"}, {"eviction": "lfu"}, {"predictor": "gate"}, {"budget": "90%"}):
        engine.change(turn)
        assert torch.equal(logits(engine), expected)
        engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_buddy_lists_travel_with_the_pack(packs: dict[str, Path], model: Path, tmp_path: Path, caplog: Logged) -> None:
    """With a pack that has them buddies can be substituted on a machine that never calibrated the model; those of
    another model are told of and not used."""
    pack = tmp_path / "pack"
    shutil.copytree(packs["whole"], pack)
    engine = load(pack)
    whole = np.arange(engine.shape.layers * 256, dtype=np.float32).reshape(-1, 16, 16) % 7 + 1
    profile = replace(drawn_profile(engine), pairs=whole + whole.transpose(0, 2, 1))
    engine.unload()
    buddies.save(profile, pack / buddies.NAME)
    engine = load(pack)
    assert engine.profile is not None and engine.profile.parts() == ("pairs",)
    engine.change({"miss": "substitute", "substitute": "buddy", "rho": 64})
    stats = list(engine.generate(CHAT, Sampling(max_new_tokens=6)))[-1].stats
    assert stats is not None and stats.changed > 0
    engine.unload()
    buddies.save(replace(profile, model_hash="0" * 64, model="another"), pack / buddies.NAME)
    engine = load(pack)
    assert engine.profile is None and "another" in caplog.text
    with pytest.raises(SettingError, match="needs a profile"):
        engine.change({"miss": "substitute", "substitute": "buddy"})
    engine.unload()
