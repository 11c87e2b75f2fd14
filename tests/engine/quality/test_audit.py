"""The meter against transformers' own model; a new answer comes first."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.engine.quality import audit as audits
from core.engine.quality import meter as meters
from core.engine.quality.audit import PendingAnswer, score
from core.engine.quality.report import Quality
from core.engine.sampler import Sampler
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint, random_model
from tests.engine.quality.conftest import DROPPING, PROMPT, by_hand, kept_of, load, say
from tests.loaded import in_layers, unloading
from tests.tiny_tokenizer import save_tokenizer

WAIT_S = 20.0


def check(engine: Engine, reference: Any, rate: float = 1.0, tokens: int = 24) -> Quality:
    said, stats, _ = say(engine, tokens)
    assert stats.audit
    lossy = kept_of(engine)
    quality = engine.audit()
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
    assert engine.quality.tokens == 48


def test_how_far_an_audit_is_can_be_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, compare = list[float](), audits.divergence

    def compared(*rows: torch.Tensor) -> tuple[float, bool]:
        seen.append(engine.scoring)
        return compare(*rows)

    monkeypatch.setattr(audits, "divergence", compared)
    monkeypatch.setattr(audits, "LOGITS_BYTES", 1)  # one token at a time
    say(engine, 6)
    assert engine.scoring == 0 and engine.audit() is not None and engine.scoring == 0
    assert 0 < seen[0] < seen[-1] < 1 and seen == sorted(seen)


@pytest.mark.long(0.1)
def test_passes_of_any_length_give_the_same(engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "CHUNK", 7)
    check(engine, reference)
    monkeypatch.setattr(audits, "LOGITS_BYTES", 1)  # one token at a time
    check(engine, reference, tokens=6)


@pytest.mark.long(0.1)
def test_a_model_that_reads_a_prompt_in_one_pass_is_scored_as_well(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_tokenizer(make_checkpoint("jamba", tmp_path / "jamba"))
    engine = Engine.load(LoadSpec.checked(str(path), Settings(DROPPING), context=256))
    assert not engine.sizes.carried
    check(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokens=8)
    engine.unload()


def test_experts_of_the_router_with_predicted_weights_are_scored(tmp_path: Path) -> None:
    random_model("qwen3_moe", num_experts=4, num_experts_per_tok=4).save_pretrained(tmp_path)
    how = {"miss": "wait", "predictor": "gate", "execute": "always", "budget": "100%"}
    with unloading(load(save_tokenizer(tmp_path), **how)) as engine:
        _, stats, steps = say(engine, 4)
        assert not stats.exact and stats.changed == 0
        assert any(step.lossy.reweighed for step in steps if step.lossy is not None)
        quality = engine.audit()
        assert quality is not None and quality.answer == stats.audit
        assert quality.kl is not None and quality.kl > 0


def test_the_exact_model_agrees_with_itself(engine: Engine) -> None:
    """Its logits while it decodes, against those of the audit's longer passes: equal but for rounding (fp32)."""
    engine.change({"miss": "wait"})
    rows: list[torch.Tensor] = []
    sampling = Sampling(max_new_tokens=24).drawn()
    sampler = Sampler(sampling, engine.device)

    def draw(ids: Sequence[int], logits: torch.Tensor) -> int:
        rows.append(logits[0].clone())
        return sampler(ids, logits)

    pieces = list(engine.generate(PROMPT, sampling, draw=draw))
    said, stats = [piece.token for piece in pieces if piece.token is not None], pieces[-1].stats
    assert stats is not None and stats.exact
    assert stats.audit == 0
    with engine.workbench("test") as bench:
        scores = score(bench, PendingAnswer(1, engine.prompt.tokens(PROMPT), said, dict(enumerate(rows))))
    assert max(scores.kl) < 1e-6
    assert all(scores.agrees)


@pytest.mark.long(0.1)
def test_only_what_was_lossy_is_compared_when_it_is_turned_off_in_the_middle(engine: Engine, reference: Any) -> None:
    said: list[int] = []
    for piece in engine.generate(PROMPT, Sampling(max_new_tokens=20)):
        if piece.token is not None:
            said.append(piece.token)
        if len(said) == 8:
            engine.change({"miss": "wait"})
    assert piece.stats.audit
    lossy = kept_of(engine)
    assert sorted(lossy) == list(range(8))
    quality = engine.audit()
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


@contextmanager
def held_in_layer(engine: Engine, layer: int, until: threading.Event) -> Iterator[threading.Event]:
    """The first pass stands still in a layer until `until`; tells when it has got there."""
    there = threading.Event()

    def stand(*_: object) -> None:
        if not there.is_set():
            there.set()
            assert until.wait(WAIT_S)

    with engine.loaded.sites[layer].module.register_forward_pre_hook(stand):
        yield there


def test_a_new_answer_takes_the_model_from_an_audit(engine: Engine, reference: Any) -> None:
    alone, _, _ = say(engine)
    lossy, said = kept_of(engine), alone
    results: list[Quality | None] = []
    layers: list[int] = []
    go_on = threading.Event()
    with in_layers(engine, layers.append), held_in_layer(engine, 1, go_on) as there:
        thread = threading.Thread(target=lambda: results.append(engine.audit()))
        thread.start()
        assert there.wait(WAIT_S)
        assert not engine.busy, "an audit keeps nobody from the model"
        answers: list[Any] = []
        asker = threading.Thread(target=lambda: answers.append(say(engine, 5, "hello")))
        asker.start()
        while not engine.access.lock.asked:  # it waits for the audit to let go
            assert asker.is_alive()
        go_on.set()
        thread.join(WAIT_S)
        asker.join(WAIT_S)
    assert results == [None]
    assert layers[:3] == [0, 1, 0], "the audit went on to another layer"
    assert len(answers[0][0]) == 5
    engine.expert_cache.check_integrity()
    quality = engine.audit()  # the first answer's, begun again
    assert quality.answer == 1
    assert quality.kl == pytest.approx(by_hand(reference, engine.prompt.tokens(PROMPT), said, lossy)[0], abs=1e-4)


@pytest.mark.long(0.1)
def test_an_audit_is_begun_three_times_and_then_given_up(engine: Engine) -> None:
    _, stats, _ = say(engine)
    stopped = threading.Event()
    stopped.set()
    for _ in range(3):
        assert engine.audit(stopped) is None
        assert engine.audit(stopped) is None, "only an answer that comes between counts"
        engine.change({"quality_rate": 0.0})  # or the answers between would wait, too
        say(engine, 2)
        engine.expert_cache.check_integrity()
    quality = engine.audit()
    assert quality.answer == stats.audit
    assert (quality.kl, quality.perplexity, quality.note) == (None, None, meters.TOO_OFTEN)
    assert engine.unscored == 0


@pytest.mark.long(0.1)
def test_only_so_many_wait(engine: Engine) -> None:
    numbers = [say(engine, 3)[1].audit for _ in range(meters.WAITING + 2)]
    told = [engine.audit() for _ in numbers]
    assert [q.answer for q in told if q is not None] == numbers
    assert [q.note for q in told if q is not None] == [meters.TOO_MANY] * 2 + [""] * meters.WAITING


def test_a_failed_copy_ends_one_audit_and_the_cache_is_whole(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    say(engine)
    fetch = engine.transfers._fetch

    def fails(*_: object) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(engine.transfers, "_fetch", fails)
    with pytest.raises(RuntimeError, match="copy of expert weights"):
        engine.audit()
    assert engine.unscored == 0
    engine.expert_cache.check_integrity()
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
        while not engine.access.lock.asked:
            assert turner.is_alive()
        go_on.set()
        turner.join(WAIT_S)
        thread.join(WAIT_S)
    assert engine.expert_cache.slots == engine.sizes.slots(Settings({"budget": "75%"}).cache.budget)
    engine.expert_cache.check_integrity()
    assert engine.audit() is not None


def test_unloading_forgets_what_waits(model: Path) -> None:
    engine = load(model)
    say(engine, 3)
    assert engine.unscored == 1
    engine.unload()
    assert engine.unscored == 0
    assert engine.audit() is None


@pytest.mark.long(0.1)
def test_an_answer_may_be_left_in_the_middle(engine: Engine) -> None:
    pieces = engine.generate(PROMPT, Sampling(max_new_tokens=20))
    for _ in range(6):
        next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert engine.unscored == 0
    assert say(engine)[1].audit == 1
    assert engine.audit() is not None
