"""Calibrating: the engine is its own meanwhile, what it found is kept and used, and what is wrong is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.server.live_state import host_state, jobs_state
from app.services.calibrator import Calibration, Reading
from app.services.host import Host
from app.store import Store
from core.errors import BusyError, MoestroError, SettingError
from core.profile import load, profile_path, save
from core.profile.trace import TraceHead, TraceWriter
from tests.app.conftest import WAIT_S, GatedEngine, QuickEngine, ended
from tests.fake_models import SHAPE, fake_estimate
from tests.fake_profiles import fake_calibrate, fake_profile
from tests.fakes import FakeEngine

TEXT = Reading(("text",), ("counts", "tae"), text="Hello there")
SLOW = replace(TEXT, text="slow")


def new_host(folder: Path, engine: type[FakeEngine] = QuickEngine) -> Host:
    host = Host(Store(folder), engine, fake_estimate, calibrating=fake_calibrate)
    assert host.chats.set_sampling(max_new_tokens=3) == ""
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    return host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = new_host(tmp_path)
    yield host
    host.close()


def over(job: Calibration) -> Calibration:
    assert job.join(WAIT_S), f"still {job.state}"
    return job


def test_a_profile_is_made_kept_and_used(host: Host, tmp_path: Path) -> None:
    stamp, settings = jobs_state(host)["calibration"]["stamp"], host_state(host)["settings"]
    job = over(host.calibrator.start(TEXT))
    assert (job.state, job.error, job.note, job.share) == ("done", "", "", 1.0)
    profile = host.models.profile
    assert profile is not None
    assert (profile.parts(), profile.source) == (("counts", "tae"), "a pasted text")
    assert load(profile_path(tmp_path, "fake"), model_hash="fake").parts() == ("counts", "tae")
    drawn = jobs_state(host)["calibration"]["stamp"]
    assert drawn != stamp
    assert host.models.change("substitute.buddy.alpha", "0.5") == ""
    assert jobs_state(host)["calibration"]["stamp"] != drawn, "buddy lists are drawn as they are set"
    assert host_state(host)["settings"] != settings, "the sidebar learns of it"
    host.models.unload()
    assert host.models.profile is None
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    assert host.models.profile is not None, "a load finds it again"
    assert over(host.calibrator.start(replace(TEXT, parts=("pairs",)))).state == "done"
    assert host.models.profile.parts() == ("counts", "pairs", "tae"), "what was measured before stays"


def test_nobody_else_uses_the_model_meanwhile(host: Host) -> None:
    job = host.calibrator.start(SLOW)
    assert host.busy
    for ask in (
        lambda: host.chats.ask(None, "hello"),
        lambda: host.chats.complete([{"role": "user", "content": "x"}], host.chats.sampling),
        host.models.unload,
        host.calibrator.delete,
        lambda: host.calibrator.start(TEXT),
        lambda: host.loader.load(host.loader.plan("demo")),
    ):
        with pytest.raises(BusyError, match="being calibrated"):
            ask()
    host.calibrator.cancel()
    assert over(job).state == "cancelled"
    assert host.models.profile is None
    assert not host.busy
    assert ended(host.chats.ask(None, "hello")).error == ""


def test_it_waits_for_no_answer(tmp_path: Path, gated: type[GatedEngine]) -> None:
    host = new_host(tmp_path, gated)
    answer = host.chats.ask(None, "hello")
    with pytest.raises(BusyError, match="An answer is being written"):
        host.calibrator.start(TEXT)
    host.chats.stop_answer(answer)
    ended(answer)
    assert over(host.calibrator.start(TEXT)).state == "done"
    host.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kinds": ()}, "one thing to read"),
        ({"parts": ()}, "one thing to measure"),
        ({"text": " "}, "Paste a text"),
        ({"kinds": ("path",)}, "Give a path"),
        ({"kinds": ("nonsense",)}, "no nonsense"),
        ({"parts": ("nonsense",)}, "no nonsense"),
    ],
)
def test_a_form_that_lacks_something_is_refused(host: Host, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        host.calibrator.start(replace(TEXT, **change))
    assert host.jobs.exclusive is None


def test_without_a_model_there_is_nothing_to_calibrate(tmp_path: Path) -> None:
    host = Host(Store(tmp_path), QuickEngine, fake_estimate, calibrating=fake_calibrate)
    with pytest.raises(MoestroError, match="No model is loaded"):
        host.calibrator.start(TEXT)
    host.close()


def test_what_goes_wrong_leaves_the_old_profile(host: Host, tmp_path: Path) -> None:
    over(host.calibrator.start(TEXT))
    before = host.models.profile
    for reading, said in (
        (replace(TEXT, text="broken"), "cannot be read"),
        (replace(TEXT, kinds=("path",), path=str(tmp_path / "gone")), "no file or folder"),
        (replace(TEXT, kinds=("traces",)), "nothing to read"),
    ):
        job = over(host.calibrator.start(reading))
        assert job.state == "error"
        assert said in job.error
        assert host.models.profile is before


def test_an_error_inside_is_told_without_its_details(tmp_path: Path) -> None:
    def explode(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("secret")

    host = Host(Store(tmp_path), QuickEngine, fake_estimate, calibrating=explode)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    job = over(host.calibrator.start(TEXT))
    assert (job.state, "log" in job.error, "secret" in job.error) == ("error", True, False)
    host.close()


def test_a_profile_that_cannot_be_used_is_said_and_ignored(tmp_path: Path) -> None:
    path = profile_path(tmp_path, "fake")
    for spoil, said in (
        (lambda: path.write_bytes(b"nonsense"), "damaged"),
        (lambda: save(fake_profile("Other", "other"), path), "Other"),
    ):
        path.parent.mkdir(exist_ok=True)
        spoil()
        host = new_host(tmp_path)
        assert host.models.model == "demo"
        assert host.models.profile is None
        assert said in host.calibrator.problem
        assert over(host.calibrator.start(TEXT)).state == "done", "a new one takes its place"
        assert host.calibrator.problem == ""
        host.close()


def test_a_profile_is_deleted_only_while_nothing_needs_it(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(host.calibrator.start(TEXT))
    path = profile_path(tmp_path, "fake")

    def needed(self: FakeEngine, profile: Any) -> None:
        raise SettingError("The prefetcher in use needs the profile.")

    monkeypatch.setattr(FakeEngine, "use_profile", needed)
    with pytest.raises(SettingError, match="needs the profile"):
        host.calibrator.delete()
    assert path.exists()
    monkeypatch.undo()
    host.calibrator.delete()
    assert not path.exists()
    assert host.models.profile is None


def test_chats_and_traces_of_this_model_are_read(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(engine: Any, texts: Any, **options: Any) -> Any:
        seen.append((texts, [trace.model_hash for trace in options["traces"]], options["source"], options["limit"]))
        return fake_calibrate(engine, texts, **options)

    host = Host(Store(tmp_path), QuickEngine, fake_estimate, calibrating=note)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    ended(host.chats.ask(None, "hello"))
    (tmp_path / "words.txt").write_text("Words.", encoding="utf-8")
    reading = Reading(("chats", "traces", "path"), ("counts",), path=f'"{tmp_path / "words.txt"}"', limit=500)
    assert over(host.calibrator.start(reading)).error == ""
    [(texts, traces, source, limit)] = list(seen)
    assert [message["role"] for message in texts[0]] == ["user", "assistant"]
    assert texts[1] == "Words."
    tokens = sum(step.tokens for step in host.store.steps.records(load=host.models.load_id))
    assert (traces, source, limit) == (["fake"], f"1 chat, words.txt, {tokens} recorded tokens", 500)
    assert host.calibrator.traces("another model") == []
    with TraceWriter(
        tmp_path / "mine.trace", TraceHead(SHAPE.layers, SHAPE.experts, SHAPE.top_k, model_hash="theirs")
    ) as writer:
        writer.add(next(host.store.steps.records(load=host.models.load_id)))
    assert over(host.calibrator.start(replace(reading, kinds=("path",), path=str(tmp_path / "mine.trace")))).error == ""
    assert seen[-1][:2] == ([], ["theirs"])
    assert host.calibrator.characters(reading) >= len("Words.") + len("hello")
    ended(host.chats.ask(None, " ".join(["word"] * 77)))  # each pass takes the fake engine 20 ms
    assert host.calibrator.speed(host.models.load_id) == pytest.approx(80 / 0.02), "a short turn says nothing of it"
    assert host.calibrator.speed(None) is None
    host.close()


def test_closing_stops_it(tmp_path: Path) -> None:
    host = new_host(tmp_path)
    job = host.calibrator.start(SLOW)
    host.close()
    assert job.state == "cancelled"
    assert not any(thread.name == "moestro-calibrate" for thread in threading.enumerate())
