"""Calibrating: what it found is kept, used and drawn; what is wrong is said."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.server.live_state import host_state, jobs_state
from app.services.calibrator import Reading
from app.services.host import Host
from app.ui.tabs.calibrate import CalibrateTab
from core.errors import BusyError, MoestroError, SettingError
from core.profile import Profile, load, profile_path, save
from core.profile.trace import TraceHead, TraceWriter
from tests.app.conftest import WAIT_S, GatedEngine, QuickEngine, ended, open_host, page
from tests.fake_models import SHAPE
from tests.fake_profiles import fake_calibrate, fake_profile
from tests.fakes import FakeEngine

TEXT = Reading(("text",), ("counts", "tae"), text="Hello there")


def new_host(folder: Path, engine: type[FakeEngine] = QuickEngine, *, calibrating: Any = fake_calibrate) -> Host:
    return open_host(folder, engine, tokens=3, calibrating=calibrating)


@pytest.fixture
def calibrating(tmp_path: Path) -> Host:
    return new_host(tmp_path)


def test_a_profile_is_made_kept_and_used(calibrating: Host, tmp_path: Path) -> None:
    stamp, settings = jobs_state(calibrating)["calibration"]["stamp"], host_state(calibrating)["settings"]
    job = ended(calibrating.calibrator.start(TEXT))
    assert (job.state, job.error, job.note, job.share) == ("done", "", "", 1.0)
    profile = calibrating.models.profile
    assert (profile.parts(), profile.source) == (("counts", "tae"), "a pasted text")
    assert load(profile_path(tmp_path, "fake"), model_hash="fake").parts() == ("counts", "tae")
    drawn = jobs_state(calibrating)["calibration"]["stamp"]
    assert drawn != stamp
    assert calibrating.models.change("substitute.buddy.smoothing", "0.5") == ""
    assert jobs_state(calibrating)["calibration"]["stamp"] != drawn, "similarities are drawn as they are set"
    assert host_state(calibrating)["settings"] != settings, "the sidebar learns of it"
    calibrating.models.unload()
    assert calibrating.models.profile is None
    assert calibrating.loader.load(calibrating.loader.plan("demo")).join(WAIT_S)
    assert calibrating.models.profile is not None, "a load finds it again"
    assert ended(calibrating.calibrator.start(replace(TEXT, parts=("pairs",)))).state == "done"
    assert calibrating.models.profile.parts() == ("counts", "pairs", "tae"), "what was measured before stays"


def test_it_waits_for_no_answer(tmp_path: Path, gated: type[GatedEngine]) -> None:
    calibrating = new_host(tmp_path, gated)
    answer = calibrating.chats.ask(None, "hello")
    with pytest.raises(BusyError, match="An answer is being written"):
        calibrating.calibrator.start(TEXT)
    calibrating.chats.stop_answer(answer)
    ended(answer)
    assert ended(calibrating.calibrator.start(TEXT)).state == "done"


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
def test_a_form_that_lacks_something_is_refused(calibrating: Host, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        calibrating.calibrator.start(replace(TEXT, **change))
    assert calibrating.jobs.exclusive is None


def test_without_a_model_there_is_nothing_to_calibrate(tmp_path: Path) -> None:
    calibrating = open_host(tmp_path, loaded=False, calibrating=fake_calibrate)
    with pytest.raises(MoestroError, match="No model is loaded"):
        calibrating.calibrator.start(TEXT)


def test_what_goes_wrong_leaves_the_old_profile(calibrating: Host, tmp_path: Path) -> None:
    ended(calibrating.calibrator.start(TEXT))
    before = calibrating.models.profile
    for reading, said in (
        (replace(TEXT, text="broken"), "cannot be read"),
        (replace(TEXT, kinds=("path",), path=str(tmp_path / "gone")), "no file or folder"),
        (replace(TEXT, kinds=("traces",)), "nothing to read"),
    ):
        job = ended(calibrating.calibrator.start(reading))
        assert job.state == "error"
        assert said in job.error
        assert calibrating.models.profile is before


def test_a_profile_that_cannot_be_used_is_said_and_ignored(tmp_path: Path) -> None:
    path = profile_path(tmp_path, "fake")
    for spoil, said in (
        (lambda: path.write_bytes(b"nonsense"), "damaged"),
        (lambda: save(fake_profile("Other", "other"), path), "Other"),
    ):
        path.parent.mkdir(exist_ok=True)
        spoil()
        calibrating = new_host(tmp_path)
        assert calibrating.models.model == "demo"
        assert calibrating.models.profile is None
        assert said in calibrating.calibrator.problem
        assert ended(calibrating.calibrator.start(TEXT)).state == "done", "a new one takes its place"
        assert calibrating.calibrator.problem == ""
        calibrating.close()


def test_a_profile_that_is_needed_is_kept(calibrating: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(calibrating.calibrator.start(TEXT))
    path = profile_path(tmp_path, "fake")

    def needed(self: FakeEngine, profile: Any) -> None:
        raise SettingError("The prefetcher in use needs the profile.")

    monkeypatch.setattr(FakeEngine, "use_profile", needed)
    with pytest.raises(SettingError, match="needs the profile"):
        calibrating.calibrator.delete()
    assert path.exists()
    monkeypatch.undo()
    calibrating.calibrator.delete()
    assert not path.exists()
    assert calibrating.models.profile is None


def test_chats_and_traces_of_this_model_are_read(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(engine: Any, texts: Any, **options: Any) -> Any:
        seen.append((texts, [trace.model_hash for trace in options["traces"]], options["source"], options["limit"]))
        return fake_calibrate(engine, texts, **options)

    calibrating = new_host(tmp_path, calibrating=note)
    ended(calibrating.chats.ask(None, "hello"))
    (tmp_path / "words.txt").write_text("Words.", encoding="utf-8")
    reading = Reading(("chats", "traces", "path"), ("counts",), path=f'"{tmp_path / "words.txt"}"', limit=500)
    assert ended(calibrating.calibrator.start(reading)).error == ""
    [(texts, traces, source, limit)] = list(seen)
    assert [message["role"] for message in texts[0]] == ["user", "assistant"]
    assert texts[1] == "Words."
    tokens = sum(step.tokens for step in calibrating.store.steps.records(load=calibrating.models.load_id))
    assert (traces, source, limit) == (["fake"], f"1 chat, words.txt, {tokens} recorded tokens", 500)
    assert calibrating.calibrator.traces("another model") == []
    with TraceWriter(
        tmp_path / "mine.trace", TraceHead(SHAPE.layers, SHAPE.experts, SHAPE.top_k, model_hash="theirs")
    ) as writer:
        writer.add(next(calibrating.store.steps.records(load=calibrating.models.load_id)))
    assert (
        ended(calibrating.calibrator.start(replace(reading, kinds=("path",), path=str(tmp_path / "mine.trace")))).error
        == ""
    )
    assert seen[-1][:2] == ([], ["theirs"])
    assert calibrating.calibrator.characters(reading) >= len("Words.") + len("hello")
    ended(calibrating.chats.ask(None, " ".join(["word"] * 77)))  # each pass takes the fake engine 20 ms
    assert calibrating.calibrator.speed(calibrating.models.load_id) == pytest.approx(80 / 0.02), (
        "a short turn says nothing of it"
    )
    assert calibrating.calibrator.speed(None) is None


NEWS = SimpleNamespace(stamp="other", dark=True)
NOW = {"stamp": "", "dark": True}


@pytest.fixture
def tab(host: Host) -> CalibrateTab:
    with page():
        return CalibrateTab(host)


def used(tab: CalibrateTab, profile: Profile) -> None:
    loaded = tab.host.models.loaded
    loaded.engine.use_profile(profile)


def redrawn(tab: CalibrateTab) -> dict[str, Any]:
    values = tab._renew(NOW, 1, "cosine", NEWS)  # type: ignore[arg-type]
    return {one.elem_id: value for one, value in zip(tab.outputs, values, strict=True) if one.elem_id}


def test_similarity_is_drawn_of_what_was_measured(tab: CalibrateTab) -> None:
    used(tab, fake_profile(parts=("pairs", "likeness")))
    found = redrawn(tab)
    assert found["profile-measure"]["visible"]
    assert "Cosine" in found["profile-similarity"]["value"].layout.title.text
    other = tab._layer(NOW, 2, "share")  # type: ignore[arg-type]
    assert "layer 2" in other[1].layout.title.text and "Share" in other[1].layout.title.text
    used(tab, fake_profile(parts=("counts", "likeness")))
    found = redrawn(tab)
    assert not found["profile-measure"]["visible"]
    assert found["profile-similarity"]["visible"] and found["profile-layer"]["visible"]
    used(tab, fake_profile(parts=("counts",)))
    found = redrawn(tab)
    assert not found["profile-similarity"]["visible"] and not found["profile-layer"]["visible"]
    used(tab, replace(fake_profile(parts=("pairs",)), pairs_weighted=None))
    assert redrawn(tab)["profile-similarity"]["visible"]
    assert tab.host.models.change("substitute.buddy.weighted", True) == ""
    assert not redrawn(tab)["profile-similarity"]["visible"]


def test_nothing_is_drawn_without_a_profile(tab: CalibrateTab) -> None:
    assert redrawn(tab)["profile-similarity"] == gr.skip()
    assert tab._layer(NOW, 0, "cosine")[0] == gr.skip()  # type: ignore[arg-type]
    assert tab._similarity(NOW, 0, "cosine") == gr.skip()  # type: ignore[arg-type]
