"""An audit leaves nothing behind: not in the cache, not in the counters, not on the device."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.types import StepRecord
from tests.checkpoints import make_checkpoint
from tests.engine.allocated import peak_bytes
from tests.engine.quality.conftest import DROPPING, load, say
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

SETTINGS = [
    {"eviction": "lru"},
    {"eviction": "lfru", "scope": "global"},
    {"eviction": "finemoe", "pins": "0:1, 1:2"},
    {"eviction": "none"},
    {"eviction": "random"},
    {"eviction": "plec", "predictor": "gate", "scope": "global"},
]


def state_of(engine: Engine) -> dict[str, Any]:
    cache, policy = engine.expert_cache, engine.expert_cache.policy
    return copy.deepcopy(
        {
            "residents": [eid for eid, slots in enumerate(cache.core.table) if slots],
            "free": [len(pool.free) for pool in cache.core.pools],
            "policy": {name: value for name, value in vars(policy).items() if isinstance(value, np.ndarray)},
            "hints": vars(cache.hints),
            "fresh": sorted(cache.prefetch_queue.fresh),
            "lost": sorted(cache.prefetch_queue.lost),
            "last_used": cache.core.last_used.tolist(),
            "pinned": cache.core.pinned,
            "tick": cache.core.tick,
            "now": cache.core.now,
            "phase": cache.copies.phase,
            "layer": cache.core.layer,
            "pace": engine.transfers.pace.gbps,
            "counts": cache.counts.figures(),
            "finished": len(engine.transfers._finished),
            "spans": list(engine.transfers._spans),
            "index": engine.parts.recorder.index,
            "passes": engine.frame().columns["step"].tolist(),
            "arena": engine.wiring.arena.bytes,
            "kv": engine.wiring.kv.bytes,
            "predictor": id(engine.predictor_host.predictor),
            "request": engine.predictor_host.request,
            "miss": id(engine.wiring.answering.step.miss),
        }
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@pytest.mark.parametrize("changes", layered(SETTINGS, quick=lambda changes: len(changes) > 1))
def test_an_audit_leaves_no_trace(engine: Engine, changes: dict[str, object]) -> None:
    engine.change({"link": "emulated", "link_gbps": 2.0, **changes})
    say(engine)
    while not engine.expert_cache.quiet():  # prefetches of the last token
        pass
    before = state_of(engine)
    assert engine.audit() is not None
    after = state_of(engine)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert not engine.expert_cache.copies.tickets
    engine.expert_cache.check_integrity()
    whole = engine.loaded.store.blob_bytes
    for eid, slots in enumerate(engine.expert_cache.core.table):
        for slot in slots:
            held, fresh = slot.raw[:whole].clone(), slot.raw[:whole]
            engine.loaded.store.fetch(eid, [slot.raw])
            assert torch.equal(held, fresh), f"the slot of {eid} holds another expert"


@pytest.mark.long(0.1)
@pytest.mark.parametrize("changes", layered(SETTINGS[1:4], quick=lambda changes: "scope" in changes))
def test_the_chat_goes_on_as_if_there_had_been_no_audit(model: Path, changes: dict[str, object]) -> None:
    told: list[list[StepRecord]] = []
    for audited in (False, True):
        engine = load(model, **changes)
        say(engine)
        assert not audited or engine.audit() is not None
        told.append(say(engine, 30, "something else")[2])
        engine.unload()
    for one, other in zip(*told, strict=True):
        for name in ("index", "ids", "layer", "expert", "outcome"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert (one.demand_bytes, one.changed, one.exact) == (other.demand_bytes, other.changed, other.exact)


def test_a_broken_off_audit_leaves_a_whole_cache(engine: Engine) -> None:
    """Those that had to leave are gone, and with them nothing else."""
    _, _, steps = say(engine)
    while not engine.expert_cache.quiet():  # or the audit asks while it waits for that
        pass
    before = state_of(engine)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > len(steps) + 2  # asked once a pass, then in every layer

    assert engine.access.lock.try_acquire_idle()
    with engine.access.session() as bench:
        assert engine.wiring.meter.audit(bench, stop) is None
    after = state_of(engine)
    engine.expert_cache.check_integrity()
    assert set(after["residents"]) < set(before["residents"])
    gone = set(before["residents"]) - set(after["residents"])
    score = before["policy"]["score"]
    for pool in engine.expert_cache.core.pools:
        inside = [eid for eid in before["residents"] if pool.part.start <= eid < pool.part.stop]
        left = sorted(score[eid] for eid in inside if eid in gone)
        assert left == sorted(score[inside])[: len(left)], "one left that the policy would have kept longer"


def test_an_audit_stays_within_the_workspace(tmp_path: Path) -> None:
    """Of a model whose logits are what takes the most."""
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "wide", vocab_size=30_000))
    engine = Engine.load(LoadSpec.checked(str(path), Settings(DROPPING), context=256))
    say(engine, 40)
    held = engine.memory().experts, engine.memory().kv
    used = peak_bytes(engine.audit)
    assert engine.unscored == 0
    assert 0 < used <= engine.sizes.workspace
    assert (engine.memory().experts, engine.memory().kv) == held
    engine.unload()
