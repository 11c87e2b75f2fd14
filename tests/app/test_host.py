"""The host over a fake engine: answers, queue, settings, loading, and what happens when things go wrong."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.host import Host
from app.live import Answer
from app.store import Store, StoreError
from core.config import LoadSpec, Sampling
from core.errors import BudgetError, BusyError, ContextError, ModelError, MoestroError
from core.types import Piece, StepRecord
from tests.app.conftest import WAIT_S, GatedEngine, QuickEngine, open_host
from tests.fakes import FakeEngine, fake_estimate


def follow(answer: Answer, until: Callable[[Answer], bool]) -> None:
    """Wait as a tab does, until the answer is as wanted."""
    version = -1
    while not until(answer):
        seen = version
        version = answer.wait(version, WAIT_S)
        assert version != seen or answer.finished, f"nothing happened: {answer.state}, {answer.n_tokens} tokens"
        assert until(answer) or not answer.finished, f"it ended: {answer.state} {answer.error}"


def ended(answer: Answer) -> Answer:
    assert answer.join(WAIT_S), f"still {answer.state}"
    return answer


def texts(host: Host, chat: int | None) -> list[tuple[str, str, str]]:
    assert chat is not None
    return [(m.role, m.text, m.state) for m in host.messages(chat)]


def test_an_answer_is_streamed_counted_and_kept(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chat(None, "  Why do caches work?  ")
    follow(answer, lambda a: a.prefill_done == a.prefill_total > 0)
    gated.gate.release(3)  # the prefill's own and two tokens'
    follow(answer, lambda a: a.n_tokens == 3)
    assert answer.state == "streaming"
    assert answer.chat_id is not None
    assert gated_host.answer(answer.chat_id) is answer  # what a reloaded tab finds
    assert texts(gated_host, answer.chat_id)[1] == ("assistant", "the cache keeps ", "writing")
    gated.gate.release(100)
    ended(answer)
    assert (answer.state, answer.error, answer.n_tokens) == ("done", "", 12)
    question, told = gated_host.messages(answer.chat_id)
    assert question.text == "Why do caches work?"
    assert (told.text, told.state) == (answer.text, "done")
    assert told.stats is not None
    assert told.stats["new_tokens"] == 12
    assert gated_host.answer(answer.chat_id) is None
    steps = list(gated_host.store.steps.records(chat=answer.chat_id))
    assert [s.phase for s in steps] == ["prefill"] + ["decode"] * 12


def test_two_generations_at_once_take_turns(gated_host: Host, gated: type[GatedEngine]) -> None:
    first, second, third = (gated_host.chat(None, text) for text in ("one", "two", "three"))
    follow(first, lambda a: a.state == "prefill")
    assert (second.state, third.state, gated_host.waiting) == ("queued", "queued", 2)
    gated.gate.release(1000)
    assert [ended(answer).state for answer in (first, second, third)] == ["done"] * 3
    assert gated.most_together == 1
    order = [s.index for chat in (1, 2, 3) for s in gated_host.store.steps.records(chat=chat)]
    assert order == sorted(order), "answers were not written in the order in which they were asked for"
    assert third.queued_ms > first.queued_ms


def test_a_second_answer_in_the_same_chat_is_refused(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chat(None, "one")
    assert answer.chat_id is not None
    chat = answer.chat_id
    for ask in (lambda: gated_host.chat(chat, "two"), lambda: gated_host.regenerate(chat),
                lambda: gated_host.edit(chat, 0, "two"), lambda: gated_host.delete(chat)):
        with pytest.raises(BusyError, match="being answered"):
            ask()
    gated.gate.release(100)
    ended(answer)
    assert len(gated_host.messages(chat)) == 2


@pytest.mark.parametrize("text", ["", "  \n\t"])
def test_an_empty_message_is_refused(host: Host, text: str) -> None:
    with pytest.raises(MoestroError, match="empty"):
        host.chat(None, text)
    assert host.store.chats.all() == []


def test_a_message_without_a_model_is_refused(tmp_path: Path) -> None:
    host = open_host(tmp_path, loaded=False)
    with pytest.raises(ModelError, match="No model is loaded"):
        host.chat(None, "hello")
    assert host.store.chats.all() == []
    host.close()


def test_a_chat_that_is_gone_is_refused(host: Host) -> None:
    for ask in (lambda: host.chat(77, "hello"), lambda: host.regenerate(77), lambda: host.edit(77, 0, "hello"),
                lambda: host.delete(77), lambda: host.rename(77, "new")):
        with pytest.raises(MoestroError, match="no longer exists"):
            ask()


class ShortEngine(QuickEngine):
    """Has a context of 40 tokens and says so as the real engine does: at the first piece."""

    def generate(self, messages: Sequence[Mapping[str, str]] | str, sampling: Sampling,
                 cancel: threading.Event | None = None) -> Iterator[Piece]:
        if not isinstance(messages, str) and self.count_tokens(messages) > 40:
            raise ContextError("The chat has more tokens than the context holds.")
        yield from super().generate(messages, sampling, cancel)


def test_a_prompt_longer_than_the_context_changes_nothing(tmp_path: Path) -> None:
    host = open_host(tmp_path, ShortEngine)
    answer = ended(host.chat(None, "word " * 50))
    assert (answer.state, answer.undone, answer.text) == ("error", True, "")
    assert "context" in answer.error
    assert answer.chat_id is not None
    assert host.outcome(answer.chat_id) is answer
    assert host.store.chats.all() == []

    chat = ended(host.chat(None, "short")).chat_id
    assert chat is not None
    before = texts(host, chat)
    assert ended(host.chat(chat, "word " * 50)).undone
    assert ended(host.edit(chat, 0, "word " * 50)).undone
    assert texts(host, chat) == before
    assert ended(host.edit(chat, 0, "still short")).error == ""
    assert texts(host, chat)[0][:2] == ("user", "still short")
    host.close()


class BrokenEngine(QuickEngine):
    """Breaks at the fourth token of its first answer."""

    def generate(self, messages: Sequence[Mapping[str, str]] | str, sampling: Sampling,
                 cancel: threading.Event | None = None) -> Iterator[Piece]:
        first = not self._steps
        for number, piece in enumerate(super().generate(messages, sampling, cancel)):
            if first and number == 4:
                raise ZeroDivisionError("slot 7 of nothing")
            yield piece


def test_an_unexpected_error_mid_answer_is_told_plainly_and_logged(tmp_path: Path,
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    host = open_host(tmp_path, BrokenEngine)
    with caplog.at_level(logging.ERROR, "moestro.app"):
        answer = ended(host.chat(None, "hello"))
    assert answer.state == "error"
    assert "error inside Moestro" in answer.error
    assert "slot 7" not in answer.error
    assert any(r.exc_info and "slot 7 of nothing" in str(r.exc_info[1]) for r in caplog.records)
    assert texts(host, answer.chat_id)[1] == ("assistant", "the cache keeps ", "error")
    assert QuickEngine.together == BrokenEngine.together == 0, "the broken answer still holds the engine"
    assert answer.chat_id is not None
    again = ended(host.regenerate(answer.chat_id))
    assert (again.state, again.n_tokens) == ("done", 12)
    host.close()


def test_a_full_disk_mid_answer_is_told_and_the_host_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = host.store.token, 0

    def token(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise StoreError("The disk is full: Moestro could not save. Free some space, then try again.")
        original(*args)

    monkeypatch.setattr(host.store, "token", token)
    answer = ended(host.chat(None, "hello"))
    assert answer.state == "error"
    assert "disk is full" in answer.error
    assert texts(host, answer.chat_id)[1] == ("assistant", answer.text, "error")
    assert answer.n_tokens == 3
    assert ended(host.chat(answer.chat_id, "again")).error == ""


def test_stop_keeps_what_was_written_and_takes_back_what_was_not_begun(gated_host: Host,
                                                                       gated: type[GatedEngine]) -> None:
    first, second = gated_host.chat(None, "one"), gated_host.chat(None, "two")
    assert first.chat_id is not None
    assert second.chat_id is not None
    gated.gate.release(3)
    follow(first, lambda a: a.n_tokens == 3)
    gated_host.stop(second.chat_id)
    assert (second.state, second.undone) == ("done", True)
    gated_host.stop(first.chat_id)
    ended(first)
    assert (first.state, first.error, first.undone) == ("done", "", False)
    assert first.stats is not None
    assert first.stats.reason == "cancelled"
    assert texts(gated_host, first.chat_id) == [("user", "one", "done"), ("assistant", "the cache keeps ", "stopped")]
    assert [c.title for c in gated_host.store.chats.all()] == ["one"]
    gated_host.stop(first.chat_id)  # nothing left to stop
    gated_host.stop(999)


def test_regenerate_and_edit_replace_what_follows(host: Host) -> None:
    chat = ended(host.chat(None, "one")).chat_id
    assert chat is not None
    ended(host.chat(chat, "two"))
    old = [m.id for m in host.messages(chat)]
    assert ended(host.regenerate(chat)).error == ""
    new = [m.id for m in host.messages(chat)]
    assert new[:3] == old[:3]
    assert new[3] > old[3]
    ended(host.edit(chat, 0, "uno"))
    assert texts(host, chat)[0][1] == "uno"
    assert len(host.messages(chat)) == 2
    for index in (1, -1, 9):
        with pytest.raises(MoestroError, match="Only your own messages"):
            host.edit(chat, index, "no")
    assert len(list(host.store.steps.records(chat=chat))) == 4 * 13, "figures of replaced answers are kept"


def test_the_engine_sees_the_chat_as_shown(tmp_path: Path) -> None:
    seen: list[list[dict[str, str]]] = []

    class Listening(QuickEngine):
        def generate(self, messages: Sequence[Mapping[str, str]] | str, sampling: Sampling,
                     cancel: threading.Event | None = None) -> Iterator[Piece]:
            assert not isinstance(messages, str)
            seen.append([dict(m) for m in messages])
            yield from super().generate(messages, sampling, cancel)

    host = open_host(tmp_path, Listening)
    first = ended(host.chat(None, "one"))
    ended(host.chat(first.chat_id, "two"))
    assert seen[1] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": first.text},
                       {"role": "user", "content": "two"}]
    assert first.chat_id is not None
    ended(host.regenerate(first.chat_id))
    assert seen[2] == seen[1]
    host.close()


@pytest.mark.parametrize(("name", "value", "told"), [
    ("budgets", "50%", "no setting called 'budgets'"), ("budget", "150%", "between 0 % and 100 %"),
    ("eviction", "psychic", "Choose one of"), ("link_gbps", "fast", "must be a number"),
    ("link_gbps", float("nan"), "must lie between")])
def test_a_bad_setting_is_told_and_changes_nothing(host: Host, name: str, value: object, told: str) -> None:
    before = dict(host.settings)
    assert told in host.change(name, value)
    assert told in host.change_many({"link_latency_us": 77.0, name: value})
    assert dict(host.settings) == before


def test_a_bad_sampling_value_is_told_and_changes_nothing(host: Host) -> None:
    before = host.sampling
    assert "must lie between" in host.set_sampling(top_k=5, temperature=9)
    assert "no sampling setting" in host.set_sampling(heat=1)
    assert host.sampling == before
    assert host.set_sampling(temperature=0.5) == ""
    assert host.sampling == replace(before, temperature=0.5)


def test_an_engine_that_refuses_or_fails_a_change_is_told(host: Host, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise BudgetError("The device has only 3 GB free.")

    def fail(self: FakeEngine, changes: Mapping[str, object]) -> None:
        raise RuntimeError("CUDA error 700")

    monkeypatch.setattr(FakeEngine, "change", refuse)
    assert host.change("budget", "100%") == "The device has only 3 GB free."
    monkeypatch.setattr(FakeEngine, "change", fail)
    assert "error inside Moestro" in host.change("budget", "100%")
    assert "CUDA error 700" in caplog.text
    assert str(host.settings["budget"]) == "50%"


def test_settings_move_while_tokens_stream_and_are_recorded(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chat(None, "one")
    gated.gate.release(2)
    follow(answer, lambda a: a.n_tokens == 2)
    assert gated_host.change("budget", "25%") == ""
    assert str(gated_host.settings["budget"]) == "25%"
    gated.gate.release(100)
    ended(answer)
    rows = gated_host.store.db.rows("SELECT * FROM changes")
    assert [(r["step"], r["name"], r["old"], r["new"]) for r in rows] == [(3, "budget", "50%", "25%")]
    steps = list(gated_host.store.steps.records(chat=answer.chat_id))
    assert steps[2].slots == 2 * steps[3].slots


def test_with_telemetry_off_only_the_change_itself_is_recorded(host: Host) -> None:
    assert host.change("telemetry", False) == ""
    answer = ended(host.chat(None, "one"))
    assert answer.n_tokens == 12
    assert len(list(host.store.steps.records(chat=answer.chat_id))) == 1
    assert [r["name"] for r in host.store.db.rows("SELECT name FROM changes")] == ["telemetry"]


def test_settings_sampling_and_model_are_remembered(tmp_path: Path) -> None:
    host = open_host(tmp_path, loaded=False)
    assert host.last_spec() is None
    assert host.change("budget", "75%") == ""
    assert host.plan("demo").settings["budget"] == "75%"
    loading = host.load(host.plan("demo", context=320, format="int8"))
    assert loading.join(WAIT_S)
    assert (host.model, host.context, host.settings["budget"]) == ("demo", 320, "75%")
    assert host.change("eviction", "lfu") == ""
    host.set_sampling(temperature=0.7)
    host.close()

    host = open_host(tmp_path, loaded=False)
    spec = host.last_spec()
    assert spec is not None
    assert (spec.model, spec.context, spec.format) == ("demo", 320, "int8")
    assert (spec.settings["budget"], spec.settings["eviction"]) == ("75%", "lfu")
    assert host.sampling.temperature == 0.7
    host.close()


def test_forgotten_names_of_an_earlier_version_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.db.put("settings", {"budget": "75%", "gone": 1, "eviction": "gone"})
    store.db.put("sampling", {"top_k": 4, "gone": 1})
    store.db.put("spec", {"model": "demo", "gone": 1, "format": "gone", "context": 320})
    store.close()
    host = open_host(tmp_path, loaded=False)
    assert (host.settings["budget"], host.sampling.top_k) == ("75%", 4)
    spec = host.last_spec()
    assert spec is not None
    assert (spec.model, spec.format, spec.context) == ("demo", "checkpoint", 320)
    assert caplog.text.count("earlier version") == 4
    host.close()


# -- loading -----------------------------------------------------------------------------------------------------------


class SlowLoad(QuickEngine):
    """Loads when the test lets it; fails when told to. Remembers who is in memory."""

    go = threading.Event()
    began = threading.Event()
    failure: Exception | None = None
    alive: set[str] = set()  # noqa: RUF012 - each test makes a class of its own

    @classmethod
    def load(cls, spec: LoadSpec, progress: Callable[[str, float], None] = lambda text, share: None,
             cancel: threading.Event | None = None) -> FakeEngine:
        progress("Reading weights", 0.25)
        cls.began.set()
        while not cls.go.wait(0.01):
            if cancel is not None and cancel.is_set():
                raise ModelError("Cancelled.")
        if cls.failure is not None:
            raise cls.failure
        cls.alive.add(spec.model)
        return cls(spec)

    def unload(self) -> None:
        self.alive.discard(self.spec.model)
        super().unload()


@pytest.fixture
def slow() -> type[SlowLoad]:
    return type("Slow", (SlowLoad,), {"go": threading.Event(), "began": threading.Event(), "alive": set()})


@pytest.fixture
def slow_host(tmp_path: Path, slow: type[SlowLoad]) -> Iterator[Host]:
    """A host with model "old" loaded, whose next load waits for `slow.go`."""
    slow.go.set()
    host = open_host(tmp_path, slow, loaded=False)
    assert host.load(host.plan("old")).join(WAIT_S)
    slow.go.clear()
    slow.began.clear()
    yield host
    slow.go.set()
    host.close()


def test_a_load_shows_its_progress_and_holds_everybody_else_off(slow_host: Host, slow: type[SlowLoad]) -> None:
    loading = slow_host.load(slow_host.plan("new"))
    assert slow.began.wait(WAIT_S)
    assert (loading.text, loading.share, loading.finished, slow_host.busy) == ("Reading weights", 0.25, False, True)
    with pytest.raises(BusyError, match="being loaded"):
        slow_host.load(slow_host.plan("third"))
    with pytest.raises(BusyError, match="being loaded"):
        slow_host.unload()
    with pytest.raises(BusyError, match="still being loaded"):
        slow_host.chat(None, "hello")
    assert slow_host.change("budget", "75%") == ""  # moved during the load: the new model gets it
    slow.go.set()
    assert loading.join(WAIT_S)
    assert (loading.state, loading.share, slow_host.model, slow.alive) == ("done", 1.0, "new", {"new"})
    assert slow_host.settings["budget"] == "75%"
    assert ended(slow_host.chat(None, "hello")).error == ""
    assert [one.model for one in slow_host.store.steps.loads() if one.ended is None] == ["new"]


def test_a_cancelled_load_keeps_the_old_model(slow_host: Host, slow: type[SlowLoad]) -> None:
    loading = slow_host.load(slow_host.plan("new"))
    assert slow.began.wait(WAIT_S)
    slow_host.cancel_load()
    assert loading.join(WAIT_S)
    assert (loading.state, loading.error, slow_host.model, slow.alive) == ("cancelled", "", "old", {"old"})
    assert "old is still loaded" in loading.text


def test_a_load_that_does_not_fit_is_told_before_anything_is_given_up(slow_host: Host) -> None:
    loading = slow_host.load(LoadSpec("new", settings=slow_host.settings.with_({"budget": "5%"})))
    assert loading.join(WAIT_S)
    assert loading.state == "error"
    assert "give at least" in loading.error
    assert "old is still loaded" in loading.error
    assert slow_host.model == "old"
    assert slow_host.settings["budget"] == "50%"


@pytest.mark.parametrize(("failure", "told"), [
    (ModelError("The file model.safetensors is cut short. Download it again."), "cut short"),
    (RuntimeError("tensor of shape [3]"), "error inside Moestro")])
def test_a_failed_load_keeps_the_old_model(slow_host: Host, slow: type[SlowLoad], failure: Exception, told: str,
                                           caplog: pytest.LogCaptureFixture) -> None:
    slow.failure = failure
    slow.go.set()
    loading = slow_host.load(slow_host.plan("new"))
    assert loading.join(WAIT_S)
    assert told in loading.error
    assert "shape [3]" not in loading.error
    assert str(failure) in caplog.text or isinstance(failure, MoestroError)
    assert (loading.state, slow_host.model, slow.alive) == ("error", "old", {"old"})
    assert ended(slow_host.chat(None, "hello")).error == ""


def test_when_memory_holds_one_model_a_failed_load_says_what_became_of_the_old(
        slow_host: Host, slow: type[SlowLoad], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def estimate(spec: LoadSpec, reusable: int = 0) -> Any:
        asked.append(reusable)
        return replace(fake_estimate(spec), problem="" if reusable else "Only 2 GB are free.")

    monkeypatch.setitem(sys.modules, "core.fit", SimpleNamespace(estimate=estimate))
    slow_host._estimate = None  # core's own, which knows what unloading gives back
    slow.failure = ModelError("The file is cut short.")
    slow.go.set()
    loading = slow_host.load(slow_host.plan("new"))
    assert loading.join(WAIT_S)
    assert "old had been unloaded to make room" in loading.error
    assert (slow_host.model, slow.alive) == (None, set())
    assert asked[0] == 0 < asked[1]
    slow.failure = None
    assert slow_host.load(slow_host.plan("new")).join(WAIT_S)
    assert slow_host.loading is not None
    assert slow_host.loading.error == "Only 2 GB are free."  # nothing is loaded that would give memory back


def test_loading_and_unloading_wait_for_answers(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chat(None, "one")
    with pytest.raises(BusyError, match="An answer is being written"):
        gated_host.load(gated_host.plan("demo"))
    with pytest.raises(BusyError, match="An answer is being written"):
        gated_host.unload()
    gated.gate.release(100)
    ended(answer)
    gated_host.unload()
    assert (gated_host.model, gated_host.frame(), gated_host.memory(), gated_host.shape) == (None, None, None, None)
    gated_host.unload()  # nothing left to unload
    assert gated_host.change("budget", "75%") == ""
    assert gated_host.settings["budget"] == "75%"


def test_close_stops_saves_and_refuses_more(tmp_path: Path, gated: type[GatedEngine]) -> None:
    host = open_host(tmp_path, gated)
    first, second = host.chat(None, "one"), host.chat(None, "two")
    gated.gate.release(4)
    follow(first, lambda a: a.n_tokens == 4)
    host.close()
    host.close()
    assert (first.finished, second.finished) == (True, True)
    with pytest.raises(MoestroError):
        host.chat(None, "three")
    store = Store(tmp_path)
    assert first.chat_id is not None
    assert [(m.text, m.state) for m in store.chats.messages(first.chat_id)] == [
        ("one", "done"), ("the cache keeps what ", "stopped")]
    assert [c.title for c in store.chats.all()] == ["one"]
    assert store.steps.loads()[0].ended is not None
    store.close()


def test_the_context_gauge_counts_the_chat_and_the_draft(host: Host) -> None:
    chat = ended(host.chat(None, "one two")).chat_id
    assert host.count_tokens(None) == 0
    assert host.count_tokens(None, "one two three") == 6
    assert host.count_tokens(chat, "more") == 5 + 15 + 4
    host.unload()
    assert host.count_tokens(chat, "more") is None


def test_records_read_back_as_the_engine_made_them(host: Host) -> None:
    made: list[StepRecord] = host._engine._steps  # type: ignore[union-attr]
    answer = ended(host.chat(None, "one"))
    kept = list(host.store.steps.records(chat=answer.chat_id))
    assert len(kept) == len(made) == 13
    for one, other in zip(kept, made, strict=True):
        for name in StepRecord.__slots__:
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype == b.dtype and (a == b).all()) if hasattr(a, "dtype") else a == b, name
