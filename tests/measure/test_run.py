"""Evaluating a tiny model: its figures are transformers' own, every mode begins alike, and nothing is left changed."""

import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.cli.eval import table
from core.engine import Engine
from core.engine.passages import windows
from core.errors import SettingError
from core.hf.cached_pass import cached_pass
from core.hf.text_to_text import empty_cache
from core.measure.evaluate.follow import follow
from core.measure.evaluate.modes import Mode, chosen
from core.measure.evaluate.questions import FactQuestion, ask
from core.measure.evaluate.rows import EvaluationRow, to_json
from core.measure.evaluate.run import Material, evaluate, gather, start_mode
from core.measure.evaluate.summary import about, result
from core.memory.store import Cancelled
from core.settings.sampling import Sampling

TEXT = "A text that nobody has trained on, long enough for a few windows of this small context. " * 2
NEVER = threading.Event()


class Numbers:
    """The tokenizer, but for texts without special tokens: those are token ids in words."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, text: str, **choices: Any) -> Any:
        if ":" in text:
            return self._real(text, **choices)
        return SimpleNamespace(input_ids=[int(word) for word in text.split()])


def greedy(engine: Engine, question: str) -> list[Any]:
    return [
        piece.token
        for piece in engine.generate([{"role": "user", "content": question}], Sampling(max_new_tokens=5))
        if piece.kind == "token"
    ]


def decoded(plain: Any, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [n - 1, V], token by token."""
    cache, rows = empty_cache(plain.config), []
    with torch.inference_mode():
        for token in ids[:-1]:
            out = cached_pass(plain, torch.tensor([[token]]), cache)
            rows.append(out.logits[0, -1].log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.long(0.1)
def test_following_a_text_gives_transformers_logits(engine: Engine, plain: Any) -> None:
    ids, steps = engine.prompt.tokens(TEXT)[:40], list[Any]()
    found = dict(follow(engine, ids, 1, NEVER, steps.append))
    assert list(found) == list(range(1, 40)) and [step.tokens for step in steps] == [1] * 39
    exact = decoded(plain, ids)
    for at, logits in found.items():
        torch.testing.assert_close(logits.log_softmax(-1), exact[at - 1], rtol=0, atol=2e-5)


def test_a_token_that_ends_answers_does_not_end_a_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = engine.prompt.tokens(TEXT)[:12]
    before = {at: logits.clone() for at, logits in follow(engine, ids, 3, NEVER, lambda step: None)}
    monkeypatch.setattr(engine.prompt, "ends", {ids[5], ids[11]})
    after = dict(follow(engine, ids, 3, NEVER, lambda step: None))
    assert list(after) == list(range(3, 12))
    for at in after:
        torch.testing.assert_close(before[at], after[at], rtol=0, atol=2e-5)


def test_a_model_without_a_chat_template_is_asked_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exact match would be 0 % whatever it knows: that is no figure, and is said in the table and in the JSON."""
    asked = [FactQuestion("12 13", "14 15", True), FactQuestion("12 14", "14 15", False)]
    monkeypatch.setattr(engine.prompt.tokenizer, "chat_template", None)
    material = gather(engine, 2, 20, asked=asked, texts=[TEXT])
    assert not material.questions and material.pieces
    assert "has no chat template" in material.note
    rows = evaluate(engine, chosen("exact"), [0.5], material)
    assert rows[0].exact_match is None and rows[0].unseen_match is None and rows[0].perplexity is not None
    found = json.loads(json.dumps(result(about(engine, material, "", "mine.jsonl"), rows)))
    assert "has no chat template" in found["questions"]["note"]
    shown = table({**found, "seconds": 1.0})
    assert "exact match is not measured" in shown and "0.0%" not in shown.splitlines()[3]
    with pytest.raises(SettingError, match=r"has no chat template.*tokens of text instead"):
        gather(engine, 2, 0, asked=asked)
    monkeypatch.undo()
    assert len(gather(engine, 2, 20, asked=asked, texts=[TEXT]).questions) == 2


def test_perplexity_is_transformers_own(engine: Engine, plain: Any) -> None:
    material = gather(engine, 0, 70, texts=[TEXT])
    assert material.tokens == 70 and [len(piece) for piece in material.pieces] == [64, 8]
    [row] = evaluate(engine, chosen("exact"), [0.5], material)
    nll = [
        -float(log_probability[token])
        for piece in material.pieces
        for log_probability, token in zip(decoded(plain, list(piece)), piece[1:], strict=True)
    ]
    assert row.perplexity == pytest.approx(math.exp(sum(nll) / 70), rel=1e-5)
    assert (row.agreement, row.kl, row.substituted_rate, row.positions, row.questions) == (1.0, 0.0, 0.0, 70, 0)
    assert row.exact_match is None and row.slots == 12 and row.decoded == 68 and row.problem == ""
    assert row.link_bytes and row.link_bytes_total == row.link_bytes * row.decoded and row.tok_s and row.tpot_ms
    assert row.tpot_ms == pytest.approx((row.compute_ms or 0) + (row.stall_ms or 0) + (row.idle_ms or 0))


def test_verdicts_are_those_of_whole_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.prompt, "tokenizer", Numbers(engine.prompt.tokenizer))
    hi, said = next((hi, said) for hi in "ABCDEFGH" if (said := greedy(engine, hi))[3] not in said[:3])
    monkeypatch.setattr(engine.prompt, "ends", {said[3]})
    text, steps = " ".join(map(str, said[:3])), list[Any]()
    assert ask(engine, FactQuestion(hi, text, True), NEVER, steps.append)
    assert [step.phase for step in steps] == ["prefill", "decode", "decode", "decode"]
    steps.clear()
    wrong = f"{said[0]} {said[1] ^ 1} {said[2]}"
    assert not ask(engine, FactQuestion(hi, wrong, True), NEVER, steps.append)
    assert len(steps) == 2  # the second token decided
    assert not ask(engine, FactQuestion(hi, f"{said[0]}", True), NEVER, steps.append)  # it goes on where it should end
    assert not ask(engine, FactQuestion(hi, f"{text} 9 9", True), NEVER, steps.append)  # it ends too early


@pytest.mark.parametrize(
    "changes",
    [{"eviction": "lfu"}, {"scope": "global", "pins": "0:7, 2:1"}, {"eviction": "none"}, {"predictor": "gate"}],
)
def test_every_mode_begins_with_the_same_cache(changes: dict[str, object], engine: Engine) -> None:
    before = engine.settings
    start_mode(engine, before.with_(changes))
    first = list(engine.expert_cache.places())
    list(engine.generate(TEXT[:40], Sampling(max_new_tokens=9)))
    used = list(engine.expert_cache.places())
    start_mode(engine, before.with_(changes))
    assert list(engine.expert_cache.places()) == first and set(engine.expert_cache.core.last_used) == {-1}
    assert changes.get("eviction") == "none" or [place > 0 for place in used] != [place > 0 for place in first]
    engine.expert_cache.check_integrity()
    engine.change(dict(before))


@pytest.mark.long(0.1)
def test_modes_beside_each_other(engine: Engine) -> None:
    before, told, rows = engine.settings, list[tuple[str, float]](), list[EvaluationRow]()
    material = gather(
        engine,
        3,
        24,
        [FactQuestion("Hi", "no", True), FactQuestion("Hi?", "no", False), FactQuestion("Who?", "no", True)],
        [TEXT],
    )
    modes = [*chosen("exact,drop"), Mode("broken", "Broken", "", {"misss": "drop"}), *chosen("drop_rho1_tae")]
    found = evaluate(
        engine,
        modes,
        [0.75, 0.5],
        material,
        progress=lambda text, share: told.append((text, share)),
        on_row=rows.append,
        done={("drop", 0.75)},
    )
    assert found == rows and [row.key for row in rows] == [
        ("exact", 0.75),
        ("broken", 0.75),
        ("drop_rho1_tae", 0.75),
        ("exact", 0.5),
        ("drop", 0.5),
        ("broken", 0.5),
        ("drop_rho1_tae", 0.5),
    ]
    assert "no setting called 'misss'" in rows[1].problem and rows[1].tok_s is None
    assert "needs a profile of this model that has tae" in rows[2].problem
    drop = rows[4]
    assert drop.link_bytes == 0 and 0 < (drop.substituted_rate or 0) == drop.dropped and (drop.kl or 0) > 0
    assert drop.exact_match == drop.unseen_match == 0.0 and drop.questions == 3 and drop.hit_rate is not None
    assert drop.hit_rate + (drop.dropped or 0) == pytest.approx(1.0)  # what was not resident was dropped
    assert rows[0].perplexity == rows[3].perplexity and (rows[3].link_bytes or 0) > (rows[0].link_bytes or 0)
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[-1] == 1.0 and engine.settings == before
    assert all(row.others_cores is not None and row.others_cores >= 0 for row in rows if not row.problem)
    json.dumps([to_json(row) for row in rows], allow_nan=False)
    assert evaluate(engine, modes, [0.5], material, done={(mode.name, 0.5) for mode in modes}) == []


@pytest.mark.parametrize("when", ["The exact model", "Drop"])
def test_cancelling_leaves_nothing_changed(engine: Engine, when: str) -> None:
    before, cancel = engine.settings, threading.Event()
    places = engine.generate("Hi", Sampling(max_new_tokens=2))
    list(places)

    def stop(text: str, share: float) -> None:
        if text.startswith(when):
            cancel.set()

    with pytest.raises(Cancelled):
        evaluate(
            engine,
            chosen("exact,drop"),
            [0.25 + 0.5],
            gather(engine, 0, 20, texts=[TEXT]),
            progress=stop,
            cancel=cancel,
        )
    assert engine.settings == before and not engine.busy
    engine.expert_cache.check_integrity()


def test_what_is_wrong_is_said(engine: Engine) -> None:
    material = Material([], windows(engine.prompt.tokenizer, engine.context, [TEXT], 8))
    for share in (0.0, 1.5, -0.5):
        with pytest.raises(SettingError, match="not possible: it is a share of the experts"):
            evaluate(engine, chosen("exact"), [share], material)
    with pytest.raises(SettingError, match="at least one question or one token"):
        gather(engine, 0, 0)
    with pytest.raises(SettingError, match="There are no questions for"):
        gather(engine, 8, 0)
    with pytest.raises(SettingError, match="at least two tokens"):
        gather(engine, 0, 8, texts=["x"])
    [row] = evaluate(engine, chosen("exact"), [0.01], material)
    assert row.problem and row.slots == 0


def test_windows_are_spread_over_the_texts(engine: Engine) -> None:
    ids = engine.prompt.tokens(TEXT)
    pieces = windows(engine.prompt.tokenizer, engine.context, [TEXT, "y", TEXT], 70)
    assert [len(piece) - 1 for piece in pieces] == [63, 7] and pieces[0] == ids[63:127]
    assert [len(piece) for piece in windows(engine.prompt.tokenizer, engine.context, [TEXT[:9]], 100)] == [9]
