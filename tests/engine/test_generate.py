"""Answers: streamed, stopped, seeded, counted; and every figure adds up."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.engine import Engine
from core.engine.settings_controller import EngineParts
from core.errors import BusyError, ContextError, SettingError
from core.measure.calibrate.gather import calibrate
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids, Outcome, Piece, StepRecord
from tests.loaded import in_layers, loaded
from tests.selection import layered

CHAT = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """One for all tests but those that change its settings or count since its load, which take a `fresh` one."""
    with loaded(model, {"budget": "50%"}, context=256) as engine:
        yield engine


def talk(engine: Engine, **sampling: float) -> list[Piece]:
    return list(engine.generate(CHAT, Sampling.checked(**sampling)))


def steps_of(pieces: list[Piece]) -> list[StepRecord]:
    return [p.step for p in pieces if p.step is not None]


def test_an_answer_streams_and_ends_with_its_statistics(engine: Engine) -> None:
    pieces = talk(engine, max_new_tokens=12)
    assert [p.kind for p in pieces] == ["prefill"] + ["token"] * 12 + ["end"]
    stats = pieces[-1].stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.reason) == (engine.count_tokens(CHAT), 12, "length")
    assert stats.ttft_ms > 0
    assert stats.tpot_ms > 0
    assert stats.device_bytes_peak <= stats.budget_bytes
    assert stats.exact
    assert not stats.emulated


def test_every_part_of_a_pass_adds_up(engine: Engine) -> None:
    pieces = talk(engine, max_new_tokens=20)
    steps, shape = steps_of(pieces), engine.shape
    for step in steps:
        assert step.compute_ms + step.stall_ms + step.idle_ms == pytest.approx(step.total_ms)
        assert step.requests == sum(len(set(step.ids[layer].ravel().tolist())) for layer in range(shape.layers))
        misses = int((step.outcome == Outcome.MISS).sum())
        assert step.demand_bytes == misses * engine.sizes.blob
        assert step.device_bytes <= step.budget_bytes
    stats = pieces[-1].stats
    decode = [s for s in steps if s.phase == "decode"]
    assert stats.hit_rate == sum(s.hits for s in decode) / sum(s.requests for s in decode)
    assert stats.tpot_ms == pytest.approx(np.mean([s.total_ms for s in decode]))
    assert sum(len(s.transfers) for s in steps) == sum(int((s.outcome == Outcome.MISS).sum()) for s in steps)


def test_the_frame_counts_what_the_steps_say(fresh: Engine) -> None:
    steps = steps_of(talk(fresh, max_new_tokens=20))
    frame = fresh.frame(layer=1)
    assert frame.columns["step"].tolist() == [s.index for s in steps]
    assert frame.columns["requests"].tolist() == [s.requests for s in steps]
    assert int((frame.place >= 2).sum()) <= fresh.expert_cache.slots
    pairs = np.zeros_like(frame.coactivation)
    for step in steps:
        for row in step.ids[1]:
            pairs[np.ix_(row, row)] += 1
    np.fill_diagonal(pairs, 0)
    assert (frame.coactivation == pairs).all()
    assert fresh.parts.telemetry.activations().sum() == sum(s.ids.size for s in steps)


def test_stopping_ends_the_answer_and_keeps_what_was_said(engine: Engine) -> None:
    cancel = threading.Event()
    pieces = []
    for piece in engine.generate(CHAT, Sampling(max_new_tokens=50), cancel):
        pieces.append(piece)
        if sum(p.kind == "token" for p in pieces) == 5:
            cancel.set()
    stats = pieces[-1].stats
    assert (stats.reason, stats.new_tokens) == ("cancelled", 5)
    assert not engine.busy


def test_a_prompt_is_told_layer_by_layer_and_stops_before_the_next(engine: Engine) -> None:
    told: list[Piece] = []
    pieces = list(engine.generate(CHAT, Sampling(max_new_tokens=2), reading=told.append))
    total, layers = engine.count_tokens(CHAT), engine.shape.layers
    assert [(one.done, one.total) for one in told] == [(total * layer // layers, total) for layer in range(layers)]
    assert pieces[0].kind == "prefill" and pieces[0].done == total

    cancel = threading.Event()

    def stop(piece: Piece) -> None:
        told.append(piece)
        if piece.done:
            cancel.set()

    told.clear()
    (end,) = engine.generate(CHAT, Sampling(max_new_tokens=2), cancel, reading=stop)
    assert [one.done for one in told] == [0, total // layers]
    assert end.stats is not None and (end.stats.reason, end.stats.new_tokens) == ("cancelled", 0)
    engine.expert_cache.check_integrity()


def test_the_context_bounds_the_answer(engine: Engine) -> None:
    stats = list(engine.generate("x" * 240, Sampling(max_new_tokens=1000)))[-1].stats
    assert stats.reason == "context"
    assert stats.prompt_tokens + stats.new_tokens == engine.context


@pytest.mark.parametrize(("text", "why"), [("x" * 400, r"has \d+ tokens, but the context holds 256"), ("", "empty")])
def test_a_prompt_that_is_too_long_or_empty_is_refused(engine: Engine, text: str, why: str) -> None:
    with pytest.raises(ContextError, match=why):
        next(engine.generate(text))
    assert not engine.busy


@pytest.mark.parametrize("context", [2, 8])
def test_a_context_shorter_than_what_a_load_times_is_filled_to_the_end(model: Path, context: int) -> None:
    with loaded(model, {"budget": "50%"}, context=context) as engine:
        pieces = list(engine.generate(Ids([5]), Sampling(max_new_tokens=20)))
        stats = pieces[-1].stats
        assert stats is not None and (stats.new_tokens, stats.reason) == (context - 1, "context")
        if context < 3:
            with pytest.raises(SettingError, match="A context of 2 tokens is too short to measure times in"):
                calibrate(engine, ["some words"], parts={"times"})
        else:
            assert calibrate(engine, ["some words"], parts={"times"}).times is not None


def test_a_context_without_room_for_an_answer_is_refused(model: Path) -> None:
    with pytest.raises(ContextError, match="1 token has no room for an answer"):
        Engine.load(LoadSpec.checked(str(model), context=1))


def test_two_answers_at_once_are_refused_and_the_first_goes_on(fresh: Engine) -> None:
    first = fresh.generate(CHAT, Sampling(max_new_tokens=4))
    next(first)
    with pytest.raises(BusyError, match="another chat"):
        next(fresh.generate(CHAT))
    with pytest.raises(BusyError, match="Stop the answer"):
        fresh.unload()
    assert [p.kind for p in first][-1] == "end"


def test_an_answer_that_begins_while_a_setting_is_applied_waits(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, apply = threading.Event(), threading.Event(), fresh.wiring.controller.apply
    pieces: list[Piece] = []

    def held_up(parts: EngineParts) -> None:
        begun.set()
        assert go_on.wait(60)
        apply(parts)

    monkeypatch.setattr(fresh.wiring.controller, "apply", held_up)
    change = threading.Thread(target=fresh.change, args=(dict(fresh.settings),))
    change.start()
    assert begun.wait(60)
    answer = threading.Thread(target=lambda: pieces.extend(fresh.generate(CHAT, Sampling(max_new_tokens=2))))
    answer.start()
    while not fresh.access.lock.asked:
        assert answer.is_alive()
    go_on.set()
    answer.join(60)
    change.join(60)
    assert [piece.kind for piece in pieces][-1] == "end"


def test_an_abandoned_answer_frees_the_engine(engine: Engine) -> None:
    answer = engine.generate(CHAT)
    next(answer)
    answer.close()
    assert talk(engine, max_new_tokens=2)[-1].stats is not None


def test_a_long_prompt_is_computed_in_chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [p.token for p in talk(engine, max_new_tokens=8)]
    monkeypatch.setattr(engine._generation._passes, "chunk", 5)
    pieces = talk(engine, max_new_tokens=8)
    prefill = [p for p in pieces if p.kind == "prefill"]
    assert len(prefill) == -(-engine.count_tokens(CHAT) // 5)
    assert prefill[-1].done == prefill[-1].total == engine.count_tokens(CHAT)
    assert [p.token for p in pieces if p.kind == "token"] == [t for t in whole if t is not None]


def test_telemetry_off_records_nothing_and_answers_the_same(fresh: Engine) -> None:
    said = [p.token for p in talk(fresh, max_new_tokens=8)]
    before = fresh.frame().columns["step"].size
    fresh.change({"telemetry": "off"})
    assert [p.token for p in talk(fresh, max_new_tokens=8)] == said
    assert fresh.frame().columns["step"].size == before


def test_an_answer_that_breaks_off_in_a_layer_leaves_it_usable(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [p.token for p in talk(fresh, max_new_tokens=6)]
    with monkeypatch.context() as patched:
        patched.setattr("core.runtime.expert_math.ExpertMath.combine", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            talk(fresh, max_new_tokens=6)
    assert not fresh.busy
    fresh.change({"budget": "75%", "eviction": "lfu"})
    fresh.expert_cache.check_integrity()
    assert [p.token for p in talk(fresh, max_new_tokens=6)] == said


def test_a_stop_text_ends_the_answer_before_it_and_no_pass_follows(engine: Engine) -> None:
    asked = Sampling(max_new_tokens=24, temperature=1.5, seed=4)
    whole = "".join(p.text for p in engine.generate(CHAT, asked))
    stop = whole[len(whole) // 2 :][:2]
    assert len(stop) == 2
    before = whole[: whole.index(stop)]
    pieces = list(engine.generate(CHAT, replace(asked, stop=("not said", stop))))
    stats, tokens = pieces[-1].stats, [p for p in pieces if p.kind == "token"]
    assert "".join(p.text for p in pieces) == before
    assert (stats.reason, stats.stop, stats.new_tokens) == ("stop", stop, len(tokens))
    assert len(tokens) < 24
    assert len(steps_of(pieces)) == len(tokens), "a prompt's pass, and one for each token after the first"
    withheld = list(engine.generate(CHAT, replace(asked, stop=(whole + "~",))))
    assert [p.text for p in withheld if p.text] == [whole], "what was withheld is said in the end"


@pytest.mark.parametrize(
    ("passes", "reuse"),
    layered(itertools.product((0, 3), (False, True)), quick=lambda case: case in {(0, False), (3, True)}),
)
def test_a_stop_in_the_middle_of_a_pass_ends_it_before_the_next_layer(engine: Engine, passes: int, reuse: bool) -> None:
    asked = Sampling(max_new_tokens=8)
    usual = [p.token for p in engine.generate(CHAT, asked)]
    cancel, layers = threading.Event(), list[int]()

    def routed(layer: int) -> None:
        layers.append(layer)
        if len(layers) == passes * engine.shape.layers + 2:  # as its second layer's experts are due
            cancel.set()

    with in_layers(engine, routed):
        pieces = list(engine.generate(CHAT, asked, cancel, reuse=reuse))
    assert layers[-2:] == [0, 1], "a layer was computed after the stop"
    stats = pieces[-1].stats
    assert stats is not None and stats.reason == "cancelled"
    assert [p.token for p in pieces if p.kind == "token"] == usual[1 : 1 + passes], "half a token was shown"
    assert len(steps_of(pieces)) == passes
    assert not engine.busy
    after = [p.token for p in engine.generate(CHAT, asked, reuse=reuse) if p.kind == "token"]
    assert after == [token for token in usual if token is not None], "the stop left something behind"
    engine.expert_cache.check_integrity()
