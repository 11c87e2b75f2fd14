"""Each answer is a sequence of its own: its request, its exactness, its KV, its end; and whose turn it is."""

import threading
from collections import abc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.engine import Engine
from core.engine.model_access import ModelLock
from core.engine.quality.sample import Sample
from core.engine.sequence import Sequence, Start, Stop
from core.engine.stop_text import StopText
from core.policy.predict import Prediction, Predictor, View
from core.profile.trace import FileTrace, TraceHead, TraceWriter
from core.runtime.batch import Batch, Share
from core.runtime.sequence_kv import SequenceKV
from core.settings.sampling import Sampling
from core.types import StepRecord

TEXT = "Why do caches work?"
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


def passes(engine: Engine, turned: dict[int, dict[str, object]] | None = None, text: str = TEXT) -> list[StepRecord]:
    """The passes of one answer, each once; `turned` = settings to change after so many tokens."""
    steps: list[StepRecord] = []
    tokens = 0
    for piece in engine.generate(text, GREEDY):
        if piece.step is not None and (not steps or piece.step is not steps[-1]):
            steps.append(piece.step)
        if piece.kind == "token":
            tokens += 1
            engine.change((turned or {}).get(tokens, {}))
    return steps


class Listener(Predictor):
    def __init__(self) -> None:
        self.heard: list[int] = []

    def predict(self, view: View) -> abc.Sequence[Prediction]:
        self.heard.append(view.request)
        return ()


def test_records_predictors_and_traces_name_the_request(engine: Engine, tmp_path: Path) -> None:
    engine.change({"predictor": "recent"})
    engine.predictor_host.predictor = listener = Listener()
    shape = engine.shape
    with TraceWriter(tmp_path / "t", TraceHead(shape.layers, shape.experts, shape.top_k)) as writer:
        first, second = passes(engine), passes(engine)
        for step in (*first, *second):
            writer.add(step)
    assert [step.rows for step in first] == [((1, step.tokens),) for step in first]
    assert [step.rows for step in second] == [((2, step.tokens),) for step in second]
    assert listener.heard == [1] * len(first) * shape.layers + [2] * len(second) * shape.layers
    rid = np.concatenate([chunk.rid for chunk in FileTrace(tmp_path / "t").chunks()])
    assert rid.tolist() == [1] * len(first) + [2] * len(second)


@pytest.mark.long(0.1)
def test_what_is_measured_is_no_request(engine: Engine) -> None:
    passes(engine)
    with engine.workbench("test") as bench:
        bench.run([3, 17, 42], bench.kv.fresh())
    assert {step.rows[0][0] for step in passes(engine)} == {2}


def test_a_sequence_is_lossy_by_itself(engine: Engine) -> None:
    """Until what was computed lossily of it is computed again; the next one is not affected."""
    engine.change({"miss": "drop"})
    before = passes(engine)
    lossy = engine.wiring.kv.holder
    assert lossy is not None and not lossy.exact and not all(step.lossless for step in before)
    engine.change({"miss": "wait"})
    assert all(step.exact for step in passes(engine, text="another question"))
    assert not lossy.exact and engine.wiring.kv.holder is not lossy

    engine.change({"miss": "drop"})
    steps = passes(engine, {3: {"miss": "wait"}})
    phases = [step.phase for step in steps]
    again = phases.index("prefill", phases.index("decode"))
    assert [step.exact for step in steps] == [False] * again + [True] * (len(steps) - again)
    assert {step.rows[0][0] for step in steps} == {3}, "what is read again belongs to the same request"
    now = engine.wiring.kv.holder
    assert now is not None and now.exact


def test_a_pass_after_a_lossy_one_is_not_exact_though_nothing_was_changed_in_it(engine: Engine) -> None:
    engine.change({"miss": "drop"})
    steps = passes(engine, {2: {"rho": 0}})  # still on, but nothing may be dropped any more
    assert steps[-1].lossless and not steps[-1].exact


def test_a_kv_outlives_its_answer_and_can_be_continued(engine: Engine) -> None:
    seen: list[torch.Tensor] = []
    with engine.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].clone())):
        longer = list(engine.generate(TEXT, GREEDY))
    tokens = [piece.token for piece in longer if piece.token is not None]
    prompt = engine.prompt.tokens(TEXT)
    list(engine.generate(TEXT, Sampling(max_new_tokens=4, temperature=0.0)))
    kv = engine.wiring.kv.holder
    assert kv is not None and kv.length == len(prompt) + 3  # the last token was drawn, not computed
    with engine.workbench("test") as bench:
        for at in (3, 4):
            assert torch.equal(bench.run([tokens[at]], kv, "decode"), seen[at + 1])
        assert kv.length == len(prompt) + 5
        assert bench.kv.fresh() is bench.kv.holder is not kv
        with pytest.raises(AssertionError, match="another sequence"):
            bench.run([tokens[5]], kv, "decode")


END = 0


def sequence(limit: int = 3, *, limited_by_context: bool = False, request: int = 1) -> Sequence:
    cache: Any = object()  # what transformers would append to
    stop = Stop({END}, limit, limited_by_context, threading.Event())
    return Sequence(request, [5, 6, 7, 8], Start(SequenceKV(cache)), lambda ids, logits: END, stop, Sample())


def test_an_end_token_ends_it_and_is_no_part_of_it() -> None:
    one = sequence()
    assert one.take(9) and not one.over and not one.take(END)
    assert (one.ids, one.drawn, one.over, one.reason) == ([5, 6, 7, 8, 9], 1, True, "stop")


def test_its_limit_ends_it_whether_it_is_the_reader_s_or_the_context_s() -> None:
    for limited_by_context, reason in ((False, "length"), (True, "context")):
        one = sequence(2, limited_by_context=limited_by_context)
        assert one.take(9) and not one.over
        assert one.take(9) and one.over and one.reason == reason


def test_who_cancels_it_ends_it_and_no_other() -> None:
    one, other = sequence(), sequence()
    one.stop.cancel.set()
    assert (one.over, one.reason) == (True, "cancelled")
    assert not other.over


def test_its_share_of_a_pass_is_what_follows_its_kv() -> None:
    one, other = sequence(request=3), sequence(request=4)
    one.kv.length = 2
    batch = Batch("prefill", (one.share(9), other.share(1)))
    assert batch.shares == (Share([7, 8], one.kv, 3), Share([5], other.kv, 4))
    assert (batch.tokens, batch.size, batch.rows) == ([7, 8, 5], 3, ((3, 2), (4, 1)))
    one.start_over(SequenceKV(object()))  # type: ignore[arg-type]
    assert one.share(9).tokens == [5, 6, 7, 8]


LETTERS = st.text("ab", max_size=12)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    stop, text = StopText(stops), ""
    for piece in pieces:
        text += stop.feed(piece)
        if stop.found:
            return text, stop.found
    return text + stop.rest(), ""


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS, max_size=3))
def test_it_shows_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    text, stops = "".join(pieces), [one for one in stops if one]
    told, found = shown(pieces, stops)
    assert bool(found) == any(one in text for one in stops)
    assert text.startswith(told + found)
    assert told == text if not found else not any(one in told for one in stops)


@given(LETTERS, st.lists(LETTERS, max_size=3))
def test_what_cannot_begin_a_stop_is_shown_at_once(text: str, stops: list[str]) -> None:
    stop = StopText(stops)
    told = stop.feed(text)
    held = text[len(told) :]
    assert stop.found or not held or any(one.startswith(held) for one in stops)


def test_of_two_that_are_complete_the_earlier_and_then_the_longer_ends_it() -> None:
    assert shown(["one two three"], ["three", "two"]) == ("one ", "two")
    assert shown(["one two"], ["tw", "two"]) == ("one ", "two")
    assert shown(["a</e", "nd>b"], ["</end>"]) == ("a", "</end>")
    assert shown(["a</e", "n"], ["</end>"]) == ("a</en", "")


WAIT_S = 20.0


def test_owners_exclude_one_another_and_guests() -> None:
    turn = ModelLock()
    assert turn.acquire()
    assert turn.taken
    assert not turn.acquire()
    assert not turn.try_acquire_idle()
    turn.release()
    assert not turn.taken
    assert turn.try_acquire_idle()
    assert not turn.try_acquire_idle()
    assert not turn.taken
    turn.release()
    assert turn.acquire()


def test_a_guest_is_asked_to_leave_and_nobody_slips_in_before_the_owner() -> None:
    turn, got = ModelLock(), list[bool]()
    assert turn.try_acquire_idle()
    owner = threading.Thread(target=lambda: got.append(turn.acquire()))
    owner.start()
    while not turn.asked:
        assert owner.is_alive()
    assert not turn.try_acquire_idle()
    turn.release()
    assert not turn.try_acquire_idle() or got == [True]
    owner.join(WAIT_S)
    assert got == [True]
    assert turn.taken
    assert not turn.asked


def test_who_comes_while_it_is_had_briefly_waits_and_is_not_refused() -> None:
    turn, got = ModelLock(), list[bool]()
    assert turn.acquire(briefly=True)
    assert not turn.taken
    assert not turn.try_acquire_idle()
    owner = threading.Thread(target=lambda: got.append(turn.acquire()))
    owner.start()
    while not turn.asked:
        assert owner.is_alive()
    turn.release()
    owner.join(WAIT_S)
    assert got == [True]
    assert not turn.acquire(briefly=True)  # an answer applies what was asked for itself, between two tokens
