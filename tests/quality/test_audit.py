"""The meter against transformers' own model; a new answer comes first; the cache is left as it was."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from core.config import LoadSpec, Sampling, Settings
from core.engine import Engine
from core.quality import audit as audits
from core.quality import meter as meters
from core.quality.audit import Spoken, score
from core.quality.told import Quality
from core.types import StepRecord
from tests.checkpoints import make_checkpoint
from tests.quality.conftest import DROPPING, PROMPT, load, say
from tests.tiny_tokenizer import save_tokenizer

WAIT_S = 20.0


def kept_of(engine: Engine) -> dict[int, torch.Tensor]:
    """The logits that wait to be compared, of the last answer."""
    return {token: row.clone() for token, row in engine.meter._waiting[-1].rows.items()}


@torch.inference_mode()
def by_hand(reference: Any, prompt: Sequence[int], said: Sequence[int],
            lossy: dict[int, torch.Tensor]) -> tuple[float, float, float]:
    """KL, agreement and perplexity by transformers' model in one pass, and torch's own losses in fp64."""
    logits = reference(input_ids=torch.tensor([[*prompt, *said]])).logits[0].double()[len(prompt) - 1 :]
    exact = torch.stack([logits[token] for token in lossy])
    other = torch.stack([*lossy.values()]).double()
    kl = F.kl_div(other.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True)
    agreement = (exact.argmax(-1) == other.argmax(-1)).double().mean()
    return float(kl), float(agreement), math.exp(F.cross_entropy(logits[: len(said)], torch.tensor(said)))


def check(engine: Engine, reference: Any, rate: float = 1.0, tokens: int = 24) -> Quality:
    said, stats, _ = say(engine, tokens)
    assert stats.audit
    lossy = kept_of(engine)
    quality = engine.audit()
    assert quality is not None
    kl, agreement, perplexity = by_hand(reference, engine.prompt.tokens(PROMPT), said, lossy)
    assert quality.kl == pytest.approx(kl, abs=1e-4)
    assert quality.agreement == pytest.approx(agreement)
    assert quality.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert (quality.answer, quality.tokens, quality.scored) == (stats.audit, len(said), len(lossy))
    assert (quality.changed, quality.assignments) == (stats.changed, stats.assignments)
    assert quality.note == ""
    return quality


def test_figures_are_those_of_transformers(engine: Engine, reference: Any) -> None:
    quality = check(engine, reference)
    assert quality.kl is not None and quality.agreement is not None
    assert quality.kl > 0.01, "nothing was lossy: the test shows nothing"
    assert quality.scored == 24
    engine.change({"quality_rate": 0.25})
    assert check(engine, reference).scored == 7
    assert engine.audit() is None
    assert engine.unscored == 0
    assert engine.quality is not None
    assert engine.quality.tokens == 48


def test_passes_of_any_length_give_the_same(engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "CHUNK", 7)
    check(engine, reference)
    monkeypatch.setattr(audits, "LOGITS_BYTES", 1)               # one token at a time
    check(engine, reference, tokens=6)


def test_a_model_that_reads_a_prompt_in_one_pass_is_scored_as_well(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_tokenizer(make_checkpoint("jamba", tmp_path / "jamba"))
    engine = Engine.load(LoadSpec.checked(str(path), Settings(DROPPING), context=256))
    assert not engine.sizes.carried
    check(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokens=8)
    engine.unload()


def test_the_exact_model_agrees_with_itself(engine: Engine) -> None:
    """Its logits while it decodes, against those of the audit's longer passes: equal but for rounding (fp32)."""
    engine.change({"miss": "wait"})
    rows: list[torch.Tensor] = []
    keep = engine.meter.keep
    engine.meter.keep = lambda logits, settings: rows.append(logits[0].clone())   # type: ignore[method-assign]
    said, stats, _ = say(engine)
    engine.meter.keep = keep                                                      # type: ignore[method-assign]
    assert stats.exact
    assert stats.audit == 0
    with engine.workbench("test") as bench:
        scores = score(bench, Spoken(1, engine.prompt.tokens(PROMPT), said, dict(enumerate(rows))))
    assert max(scores.kl) < 1e-6
    assert all(scores.agrees)


def test_only_what_was_lossy_is_compared_when_it_is_turned_off_in_the_middle(engine: Engine, reference: Any) -> None:
    said: list[int] = []
    for piece in engine.generate(PROMPT, Sampling(max_new_tokens=20)):
        if piece.token is not None:
            said.append(piece.token)
        if len(said) == 8:
            engine.change({"miss": "wait"})
    assert piece.stats is not None
    assert piece.stats.audit
    lossy = kept_of(engine)
    assert sorted(lossy) == list(range(8))
    quality = engine.audit()
    assert quality is not None
    kl, _, perplexity = by_hand(reference, engine.prompt.tokens(PROMPT), said, lossy)
    assert quality.kl == pytest.approx(kl, abs=1e-4)
    assert quality.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert (quality.scored, quality.tokens) == (8, 20)


@pytest.mark.parametrize("changes", [{"miss": "wait"}, {"quality_rate": 0.0}, {"rho": 0}])
def test_nothing_waits_where_nothing_is_lossy_or_asked_for(engine: Engine, changes: dict[str, object]) -> None:
    engine.change(changes)
    _, stats, _ = say(engine)
    assert stats.audit == 0
    assert engine.unscored == 0
    assert engine.audit() is None
    assert stats.exact == (changes != {"quality_rate": 0.0})


# --------------------------------------------------------------------------------------------- a new answer comes first


@contextmanager
def held_in_layer(engine: Engine, layer: int, until: threading.Event) -> Iterator[threading.Event]:
    """The first pass stands still in a layer until `until`; tells when it has got there."""
    there = threading.Event()

    def stand(*_: object) -> None:
        if not there.is_set():
            there.set()
            assert until.wait(WAIT_S)

    hook = engine._sites[layer].module.register_forward_pre_hook(stand)
    try:
        yield there
    finally:
        hook.remove()


def test_a_new_answer_takes_the_model_from_an_audit(engine: Engine, reference: Any) -> None:
    alone, _, _ = say(engine)
    lossy, said = kept_of(engine), alone
    results: list[Quality | None] = []
    layers: list[int] = []
    go_on = threading.Event()
    hooks = [site.module.register_forward_pre_hook(lambda *_, at=site.index: layers.append(at))
             for site in engine._sites]
    with held_in_layer(engine, 1, go_on) as there:
        thread = threading.Thread(target=lambda: results.append(engine.audit()))
        thread.start()
        assert there.wait(WAIT_S)
        assert not engine.busy, "an audit keeps nobody from the model"
        answers: list[Any] = []
        asker = threading.Thread(target=lambda: answers.append(say(engine, 5, "hello")))
        asker.start()
        while not engine._turn.asked:                            # it waits for the audit to let go
            assert asker.is_alive()
        go_on.set()
        thread.join(WAIT_S)
        asker.join(WAIT_S)
    for hook in hooks:
        hook.remove()
    assert results == [None]
    assert layers[:3] == [0, 1, 0], "the audit went on to another layer"
    assert len(answers[0][0]) == 5
    engine.residency.check_integrity()
    quality = engine.audit()                                     # the first answer's, begun again
    assert quality is not None
    assert quality.answer == 1
    assert quality.kl == pytest.approx(by_hand(reference, engine.prompt.tokens(PROMPT), said, lossy)[0], abs=1e-4)


def test_an_audit_is_begun_three_times_and_then_given_up(engine: Engine) -> None:
    _, stats, _ = say(engine)
    stopped = threading.Event()
    stopped.set()
    for _ in range(3):
        assert engine.audit(stopped) is None
        assert engine.audit(stopped) is None, "only an answer that comes between counts"
        engine.change({"quality_rate": 0.0})                     # or the answers between would wait, too
        say(engine, 2)
        engine.residency.check_integrity()
    quality = engine.audit()
    assert quality is not None
    assert quality.answer == stats.audit
    assert (quality.kl, quality.perplexity, quality.note) == (None, None, meters.TOO_OFTEN)
    assert engine.unscored == 0


def test_only_so_many_wait(engine: Engine) -> None:
    numbers = [say(engine, 3)[1].audit for _ in range(meters.WAITING + 2)]
    told = [engine.audit() for _ in numbers]
    assert [q.answer for q in told if q is not None] == numbers
    assert [q.note for q in told if q is not None] == [meters.TOO_MANY] * 2 + [""] * meters.WAITING


def test_a_failed_copy_ends_one_audit_and_leaves_the_cache_whole(engine: Engine,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    say(engine)
    fetch = engine.transfers._fetch

    def fails(*_: object) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(engine.transfers, "_fetch", fails)
    with pytest.raises(RuntimeError, match="copy of expert weights"):
        engine.audit()
    assert engine.unscored == 0
    engine.residency.check_integrity()
    monkeypatch.setattr(engine.transfers, "_fetch", fetch)
    assert say(engine)[1].audit


def test_a_setting_acts_at_once_while_an_audit_runs(engine: Engine) -> None:
    say(engine)
    go_on = threading.Event()
    with held_in_layer(engine, 1, go_on) as there:
        thread = threading.Thread(target=engine.audit)
        thread.start()
        assert there.wait(WAIT_S)
        turner = threading.Thread(target=lambda: engine.change({"budget": "75%"}))
        turner.start()
        while not engine._turn.asked:
            assert turner.is_alive()
        go_on.set()
        turner.join(WAIT_S)
        thread.join(WAIT_S)
    assert engine.residency.slots == engine.sizes.slots(Settings({"budget": "75%"}).budget)
    engine.residency.check_integrity()
    assert engine.audit() is not None


def test_unloading_forgets_what_waits(model: Path) -> None:
    engine = load(model)
    say(engine, 3)
    assert engine.unscored == 1
    engine.unload()
    assert engine.unscored == 0
    assert engine.audit() is None


# ------------------------------------------------------------------------------------------------- and nothing is left


SETTINGS = [{"eviction": "lru"}, {"eviction": "lfu", "eviction.lfu.half_life": 8, "scope": "global"},
            {"eviction": "finemoe", "pins": "0:1, 1:2"}, {"eviction": "none"}, {"eviction": "random"},
            {"eviction": "plec", "predictor": "gate", "scope": "global"}]


def state_of(engine: Engine) -> dict[str, Any]:
    """Everything that an audit must leave as it was."""
    cache, policy = engine.residency, engine.residency.policy
    return copy.deepcopy({
        "residents": [eid for eid, slot in enumerate(cache._slot) if slot is not None],
        "free": [len(pool.free) for pool in cache._pools],
        "policy": {name: value for name, value in vars(policy).items() if isinstance(value, np.ndarray)},
        "hints": vars(cache.hints), "fresh": sorted(cache.ahead.fresh), "lost": sorted(cache.ahead.lost),
        "last_used": cache.last_used, "pinned": cache.pinned, "tick": cache._tick, "now": cache.now,
        "phase": cache.phase, "layer": cache._layer, "pace": engine.transfers.pace.gbps,
        "counts": {name: getattr(cache.counts, name) for name in ("issued", "used", "wasted", "demand_bytes")},
        "finished": len(engine.transfers._finished), "spans": list(engine.transfers._spans),
        "index": engine.recorder.index, "passes": len(engine.telemetry._steps), "arena": engine.arena.bytes,
        "kv": engine._kv.bytes, "predictor": id(engine.foresight.predictor), "request": engine.foresight.request,
        "tainted": engine.recorder.tainted, "miss": id(engine._step.miss)})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@pytest.mark.parametrize("changes", SETTINGS)
def test_an_audit_leaves_no_trace(engine: Engine, changes: dict[str, object]) -> None:
    engine.change({"link": "emulated", "link_gbps": 2.0, **changes})
    say(engine)
    while not engine.residency.quiet():                          # prefetches of the last token
        pass
    before = state_of(engine)
    assert engine.audit() is not None
    after = state_of(engine)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert not engine.residency._tickets
    engine.residency.check_integrity()
    whole = engine._store.blob_bytes
    for eid, slot in enumerate(engine.residency._slot):
        if slot is not None:
            held, fresh = slot.raw[:whole].clone(), slot.raw[:whole]
            engine._store.fetch(eid, slot.raw)
            assert torch.equal(held, fresh), f"the slot of {eid} holds another expert"


@pytest.mark.parametrize("changes", SETTINGS[1:4])
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
    before = state_of(engine)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > len(steps) + 2                            # asked once a pass, then in every layer

    assert engine._turn.visit()
    with engine._lent() as bench:
        assert engine.meter.audit(bench, stop) is None
    after = state_of(engine)
    engine.residency.check_integrity()
    assert set(after["residents"]) < set(before["residents"])
    gone = set(before["residents"]) - set(after["residents"])
    score = before["policy"]["score"]
    for pool in engine.residency._pools:
        inside = [eid for eid in before["residents"] if pool.part.start <= eid < pool.part.stop]
        left = sorted(score[eid] for eid in inside if eid in gone)
        assert left == sorted(score[inside])[: len(left)], "one left that the policy would have kept longer"


def peak_bytes(run: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


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


def test_an_answer_may_be_left_in_the_middle(engine: Engine) -> None:
    pieces = engine.generate(PROMPT, Sampling(max_new_tokens=20))
    for _ in range(6):
        next(pieces)
    pieces.close()                                               # type: ignore[attr-defined]
    assert engine.unscored == 0
    assert say(engine)[1].audit == 1
    assert engine.audit() is not None
