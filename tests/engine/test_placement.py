"""Slots per layer and pinned experts in a loaded model: they act live, are refused whole, and change no answer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import Engine
from core.errors import SettingError
from core.memory.ticket import Ticket
from core.policy.eviction import GONE
from core.profile import Profile
from core.profile.trace import FileTrace, TraceHead, TraceWriter
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.simulate import Config, Replay
from core.simulate.run import maker
from core.types import Ids
from tests.decoded import passes_of
from tests.selection import layered

CHAT = [{"role": "user", "content": "What does json.dumps do?"}]


def profile_of(engine: Engine) -> Profile:
    """Counts that differ from layer to layer: the first layers have favourites, the last ones use all alike."""
    shape = engine.shape
    steep = np.linspace(0.5, 0, shape.layers)[:, None]
    counts = (1000 * np.exp(-steep * np.arange(shape.experts))).astype(np.int64)
    recall = np.linspace(0.2, 0.9, shape.layers, dtype=np.float32)
    recall[0] = np.nan
    sizes = shape.layers, shape.experts, shape.top_k, shape.hidden, 1000
    return Profile("demo", engine.model_hash, *sizes, "a test", "", counts=counts, gate_recall=recall)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked("demo", Settings({"budget": "50%", "link": "own"}), device="cpu"))
    yield engine
    engine.unload()


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    loaded.change(Settings({"budget": "50%", "link": "own"}))
    loaded.use_profile(None)
    return loaded


def capacities(engine: Engine) -> list[int]:
    return [engine.expert_cache.pool(layer).capacity for layer in range(engine.shape.layers)]


def said(engine: Engine, tokens: int = 6) -> str:
    return "".join(piece.text for piece in engine.generate(CHAT, Sampling(max_new_tokens=tokens)))


@pytest.mark.long(0.1)
@pytest.mark.parametrize("name", layered(["profile", "adapmoe"], quick=lambda name: name == "profile"))
def test_slots_move_to_the_layers_that_gain_most_and_follow_the_budget(engine: Engine, name: str) -> None:
    expected, shape = said(engine), engine.shape
    engine.use_profile(profile_of(engine))
    engine.change({"layer_slots": name})
    sizes = capacities(engine)
    assert sum(sizes) == engine.sizes.slots(engine.settings.cache.budget) == len(engine.wiring.arena)
    assert sizes[0] < sizes[-1] and min(sizes) >= shape.top_k
    assert said(engine) == expected
    engine.change({"budget": "70%"})
    assert sum(capacities(engine)) == engine.sizes.slots(engine.settings.cache.budget) and capacities(engine) != sizes
    engine.change({"scope": "global"})
    assert engine.expert_cache.pool(0).capacity == engine.sizes.slots(engine.settings.cache.budget)
    engine.change({"scope": "layer", "budget": "50%"})
    assert capacities(engine) == sizes
    assert said(engine) == expected
    engine.expert_cache.check_integrity()
    engine.change({"layer_slots": "uniform"})
    assert max(capacities(engine)) - min(capacities(engine)) <= 1


def test_what_needs_a_profile_is_refused_without_one_and_keeps_its_profile(engine: Engine) -> None:
    with pytest.raises(SettingError, match=r"Slots per layer “AdapMoE” needs a profile"):
        engine.change({"layer_slots": "adapmoe", "budget": "60%"})
    assert engine.settings["layer_slots"] == "uniform" and engine.settings["budget"] == "50%"
    engine.use_profile(profile_of(engine))
    engine.change({"layer_slots": "adapmoe"})
    with pytest.raises(SettingError, match="needs a profile"):
        engine.use_profile(None)
    assert engine.profile is not None
    with pytest.raises(SettingError, match="that has gate_recall"):
        engine.use_profile(replace(profile_of(engine), gate_recall=None))
    with pytest.raises(SettingError, match="needs a profile"):
        Engine.load(LoadSpec.checked("demo", Settings({"layer_slots": "profile"}), device="cpu"))


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ("99:0", "names layer 99"),
        ("0:0, 0:1, 0:2, 0:3, 0:4, 0:5, 0:6, 0:7, 0:8, 0:9, 0:10, 0:11, 0:12", "Layer 0 has"),
        ("top:1", "needs a profile"),
    ],
)
@pytest.mark.parametrize(
    "finds",
    layered([None, lambda model_hash: None], quick=lambda finds: finds is None),
    ids=["no profiles", "none found"],
)
def test_a_model_is_not_loaded_with_pins_that_it_cannot_have(pins: str, why: str, finds: Any) -> None:
    with pytest.raises(SettingError, match=why):
        Engine.load(LoadSpec.checked("demo", Settings({"pins": pins}), device="cpu"), profile=finds)


def test_pins_and_sizes_of_the_load_are_there_from_the_start(engine: Engine) -> None:
    settings = Settings({"budget": "50%", "link": "own", "layer_slots": "adapmoe", "pins": "0:31, top:1"})
    profile = profile_of(engine)
    fresh = Engine.load(LoadSpec.checked("demo", settings, device="cpu"), profile=lambda model_hash: profile)
    pinned = {31, *(layer * fresh.shape.experts for layer in range(fresh.shape.layers))}
    assert fresh.expert_cache.core.pinned == pinned and all(map(fresh.expert_cache.is_resident, pinned))
    assert len(set(capacities(fresh))) > 1 and sum(capacities(fresh)) == len(fresh.wiring.arena)
    assert fresh.expert_cache.take_counts().demand_bytes == 0  # what a load copies is no demand
    fresh.unload()


def test_another_profile_divides_anew(engine: Engine) -> None:
    profile = profile_of(engine)
    engine.use_profile(profile)
    engine.change({"layer_slots": "profile"})
    before = capacities(engine)
    engine.use_profile(replace(profile, counts=profile.counts[::-1]))
    assert capacities(engine) == before[::-1] or sorted(capacities(engine)) == sorted(before)
    assert capacities(engine)[0] > capacities(engine)[-1]


@pytest.mark.long(0.1)
def test_pins_are_there_at_once_and_stay(engine: Engine) -> None:
    expected, shape = said(engine), engine.shape
    pins = [(layer, shape.experts - 1) for layer in range(shape.layers)]
    eids = {layer * shape.experts + expert for layer, expert in pins}
    engine.change({"pins": ", ".join(f"{layer}:{expert}" for layer, expert in pins)})
    assert all(engine.expert_cache.is_resident(eid) for eid in eids)
    assert set(engine.frame().pinned) == eids
    evictions: list[dict[str, object]] = [{}, {"eviction": "none"}, {"eviction": "random"}]
    for change in (*evictions, {"scope": "global"}, {"scope": "layer"}, {"budget": "35%"}):
        engine.change(change)
        assert said(engine) == expected
        assert all(engine.expert_cache.is_resident(eid) for eid in eids), change
        engine.expert_cache.check_integrity()


def test_pins_that_leave_no_room_are_refused_whoever_takes_it(engine: Engine) -> None:
    shape = engine.shape
    most = capacities(engine)[0] - shape.top_k
    engine.change({"pins": ", ".join(f"0:{e}" for e in range(most))})
    for change in ({"pins": ", ".join(f"0:{e}" for e in range(most + 1))}, {"budget": "30%"}):
        before = engine.settings
        with pytest.raises(SettingError, match="Layer 0 has"):
            engine.change(change)
        assert engine.settings is before
    with pytest.raises(SettingError, match="this model has layers 0 to"):
        engine.change({"pins": "99:0"})
    with pytest.raises(SettingError, match=r"top:1 needs a profile"):
        engine.change({"pins": "top:1"})
    profile = profile_of(engine)
    engine.use_profile(profile)
    engine.change({"pins": "top:1"})
    assert engine.expert_cache.core.pinned == {layer * shape.experts for layer in range(shape.layers)}
    with pytest.raises(SettingError, match=r"top:1 needs a profile"):
        engine.use_profile(None)


def test_bypass_acts_live_within_the_budget_and_changes_no_answer(engine: Engine) -> None:
    engine.change({"eviction": "lfu", "budget": "30%"})
    shape, slots, answer = engine.shape, engine.expert_cache.slots, said(engine, 24)
    refill(engine)
    engine.change({"bypass": True})
    bypassed = 0
    for piece in engine.generate(CHAT, Sampling(max_new_tokens=24)):
        if piece.step is not None:
            bypassed += piece.step.bypassed
            assert piece.step.slots == slots and piece.step.device_bytes <= piece.step.budget_bytes
    assert bypassed > 0 and len(engine.expert_cache.core.transit) == shape.top_k
    assert sum(capacities(engine)) == slots - shape.top_k
    engine.expert_cache.check_integrity()
    assert said(engine, 24) == answer
    engine.change({"budget": "100%"})
    assert not engine.expert_cache.core.transit, "nothing is left to set aside for"
    engine.change({"budget": "30%", "bypass": False})
    assert sum(capacities(engine)) == slots
    with pytest.raises(SettingError, match="Bypass sets 4 slots aside"):
        engine.change({"bypass": True, "budget": f"{100 * shape.top_k / shape.experts}%"})
    engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_prefetches_beside_displace_none_and_change_no_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.change({"eviction": "lfu", "budget": "30%", "predictor": "all_next", "bypass": True})
    answer, link, submit = said(engine, 24), engine.transfers, engine.transfers.submit
    refill(engine)
    ahead = dict[bool, list[int]]()  # whom each prefetch displaced, -1 = nobody

    def submitted(ticket: Ticket) -> Ticket:
        if not ticket.demand:
            ahead.setdefault(engine.settings.prefetch.beside, []).append(ticket.displaced)
        return submit(ticket)

    monkeypatch.setattr(link, "submit", submitted)
    used = 0
    for beside in (True, False, True):
        engine.change({"prefetch_beside": beside})
        for piece in engine.generate(CHAT, Sampling(max_new_tokens=24)):
            used += piece.step.prefetch_used + piece.step.prefetch_late if piece.step is not None and beside else 0
        engine.expert_cache.check_integrity()
        for n, _ in enumerate(engine.generate(CHAT, Sampling(max_new_tokens=24))):
            if n == 8:
                engine.change({"prefetch_beside": not beside})  # in the middle of an answer
        engine.expert_cache.check_integrity()
        assert said(engine, 24) == answer
    assert used and {*ahead[True]} == {-1} and max(ahead[False]) >= 0


def test_static_keeps_what_the_profile_saw_used_most(engine: Engine) -> None:
    shape, profile = engine.shape, profile_of(engine)
    counts = np.random.default_rng(0).permuted(np.tile(np.arange(shape.experts), (shape.layers, 1)), axis=1)
    engine.use_profile(replace(profile, counts=counts))
    engine.change({"eviction": "static"})
    said(engine, 24)
    kept = []
    for layer, capacity in enumerate(capacities(engine)):
        best = np.argsort(-counts[layer])[: capacity - shape.top_k] + layer * shape.experts
        kept.append(np.mean([engine.expert_cache.is_resident(int(eid)) for eid in best]))
    assert np.mean(kept) > 0.9


def test_lcp_counts_each_token_of_a_prompt(engine: Engine) -> None:
    """mu is the number of tokens that chose an expert (MoEpic section 3.3), in waves, too; nu counts tokens anyway."""
    engine.change({"eviction": "lcp", "budget": "25%"})
    refill(engine)
    shape, prompt = engine.shape, Ids([7 * at for at in range(60)])
    step = next(piece.step for piece in engine.generate(prompt, Sampling(max_new_tokens=1)) if piece.step is not None)
    assert (step.phase, step.tokens) == ("prefill", 60)
    mu = np.stack([np.bincount(ids.ravel(), minlength=shape.experts) for ids in step.ids])
    assert mu.sum() == shape.layers * 60 * shape.top_k and mu.max() > 30, "some experts are chosen by most tokens"
    policy = engine.expert_cache.policy
    kept = np.flatnonzero((policy.score != GONE) & (mu.ravel() > 0))
    assert len(kept) > shape.layers
    assert policy.score[kept] == pytest.approx(np.log2(mu.ravel()[kept]) + 60 * 2 / 128)
    assert ((mu > 0).sum(1) > capacities(engine)).all(), "every layer takes its experts in waves"


@pytest.mark.parametrize(
    "change",
    layered(
        [
            {"layer_slots": "profile"},
            {"layer_slots": "adapmoe", "eviction": "lfu"},
            {"eviction": "static"},
            {"pins": "0:3, 1:5, top:1"},
            {"pins": "top:2", "scope": "global", "eviction": "lcp"},
            {"bypass": True, "eviction": "lfu", "budget": "30%"},
            {"bypass": True, "eviction": "lfru", "layer_slots": "profile"},
        ],
        quick=lambda change: "scope" in change or change == {"bypass": True, "eviction": "lfu", "budget": "30%"},
    ),
    ids=lambda change: "-".join(map(str, change.values())),
)
def test_the_simulator_agrees_request_by_request(engine: Engine, change: dict[str, object], tmp_path: Path) -> None:
    shape, profile = engine.shape, profile_of(engine)
    engine.use_profile(profile)
    engine.change(change)
    refill(engine)
    with TraceWriter(tmp_path / "t", TraceHead(shape.layers, shape.experts, shape.top_k, model="demo")) as writer:
        steps = passes_of(engine.generate(CHAT, Sampling(max_new_tokens=16)))
        for step in steps:
            writer.add(step)
    config = Config.of(engine.settings, engine.expert_cache.slots, shape.layers, shape.experts, shape.top_k, profile)
    where, hints = FileTrace(tmp_path / "t"), config.hints(shape.layers, shape.experts)
    replay = Replay(where, maker(config), [config.capacity], config.scope, "filled", hints, config.transit)
    tally: Any = replay.run()
    misses = sum(np.bincount(step.layer[step.outcome >= 3], minlength=shape.layers) for step in steps)
    assert tally.misses.sum((0, 1)).tolist() == misses.tolist()
    kept = [eid for eid in range(shape.total) if engine.expert_cache.is_resident(eid)]
    assert np.flatnonzero(replay.cache.policy.score != GONE).tolist() == kept


def refill(engine: Engine) -> None:
    cache = engine.expert_cache
    cache.core.evict_all()
    cache.reshape(make_policy=cache.make_policy)
    cache.pin(cache.core.pinned)
    cache.fill()
    cache.core.now = 0
