"""The memory that a time per token needs, before a load; and how far such predictions were from what answers took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app import cli
from app.services import predicting
from app.services.host import Host
from app.services.predictions import (
    MOST,
    Prediction,
    keep_prediction,
    predictions_path,
    read_predictions,
    so_far,
)
from app.ui.sidebar import ModelSection
from app.ui.tabs.calibrate_plan import PlanPanel
from core.errors import SettingError
from core.profile import profile_path, save
from tests.app.conftest import GatedEngine, ended, follow, page
from tests.app.test_planner import engine_of, measured
from tests.fake_models import MB, SHAPE


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "LEAST", 4)


def known(host: Host) -> None:
    """The model's profile is stored and in use."""
    save(measured(), profile_path(host.store.folder, "fake"))
    engine_of(host).use_profile(measured())


def kept(host: Host) -> list[Prediction]:
    return read_predictions(host.store.folder, "fake")


@contextmanager
def heard(host: Host) -> Iterator[None]:
    """Leaves when the host has noted the answers that ended inside."""
    yield
    assert host.chats is not None
    host._writer.close()


def test_the_last_ones_are_kept_and_summed_up(tmp_path: Path) -> None:
    assert so_far(read_predictions(tmp_path, "m")) == ""
    keep_prediction(tmp_path, "m", Prediction(9.0, 10.0))
    assert so_far(read_predictions(tmp_path, "m")) == "Predictions so far: median 10% off over 1 answer."
    for number in range(MOST + 5):
        keep_prediction(tmp_path, "m", Prediction(10.0 + number, 20.0))
    found = read_predictions(tmp_path, "m")
    assert len(found) == MOST and found[-1] == Prediction(10.0 + MOST + 4, 20.0)
    assert read_predictions(tmp_path, "other") == []
    assert predictions_path(tmp_path, "m").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[[1]]", '[["x", 2]]', "[[1, NaN]]", "\udcff", "[" * 70000])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    keep_prediction(tmp_path, "m", Prediction(1.0, 2.0))
    predictions_path(tmp_path, "m").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_predictions(tmp_path, "m") == []
    predictions_path(tmp_path, "m").write_text("[[1, 0], [1, 2]]")
    assert read_predictions(tmp_path, "m") == [Prediction(1.0, 2.0)]


def test_an_answer_is_compared_with_what_was_predicted(host: Host) -> None:
    known(host)
    host.planner.use(host.planner.propose())
    plan = host.planner.propose().now
    with heard(host):
        ended(host.chats.ask(None, "hello"))
    assert kept(host) == [Prediction(round(plan.tpot_ms, 4), 20.0)]
    with page():
        said = PlanPanel(host)._plan({"dark": True})[2]
    assert so_far(kept(host)) in said
    host.calibrator.delete()
    assert kept(host) == []


def test_without_a_profile_or_of_few_tokens_nothing_is(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(host.chats.ask(None, "hello"))
    known(host)
    assert host.models.change("telemetry", False) == ""
    ended(host.chats.ask(None, "hello"))  # nothing tells whether its settings stayed
    assert host.models.change("telemetry", True) == ""
    monkeypatch.setattr(predicting, "LEAST", 100)
    with heard(host):
        ended(host.chats.ask(None, "hello"))
    assert kept(host) == []


def test_an_answer_whose_settings_moved_is_not_counted(gated_host: Host, gated: type[GatedEngine]) -> None:
    host = gated_host
    known(host)
    with heard(host):
        answer = host.chats.ask(None, "hello")
        gated.gate.release(3)
        follow(answer, lambda now: now.n_tokens == 3)
        assert host.models.change("budget", "70%") == ""
        gated.gate.release(20)
        ended(answer)
    assert kept(host) == []


def test_the_command_line_says_how_far_they_were_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    save(measured(), tmp_path / "p")
    words = ["plan", "--profile", str(tmp_path / "p"), "--json"]
    assert cli.main(words) == 0 and "Predictions so far" not in capsys.readouterr().out
    keep_prediction(tmp_path, "fake", Prediction(15.0, 20.0))
    assert cli.main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "Predictions so far: median 25% off over 1 answer." in lines
    assert json.loads(last)["earlier"] == [{"predicted_ms": 15.0, "measured_ms": 20.0}]


def asked(section: ModelSection, tpot_ms: float | None, **changes: Any) -> str:
    form = dict(
        zip(["model", *(one.elem_id for one in section.choices)], [one.value for one in section.form], strict=True)
    )
    return section._needed(tpot_ms, *(form | changes).values())


def test_the_least_memory_for_a_time_is_said_before_a_load(host: Host) -> None:
    with page():
        section = ModelSection(host, gr.HTML({}))
    assert "open the Calibrate tab" in asked(section, 40) and "Calibrate now" in asked(section, 40)
    known(host)
    host.models.unload()
    spec = host.loader.plan("demo")
    profile = measured()
    resident_ms = profile.times["head"] + SHAPE.layers * (profile.times["att"] + profile.times["moe"])
    slow, fast = (host.loader.least_memory(spec, ms) for ms in (3 * resident_ms, 1.02 * resident_ms))
    assert slow.experts <= fast.experts <= fast.total == SHAPE.total and fast.tpot_ms <= 1.02 * resident_ms
    assert fast.bytes == 6 * MB + fast.experts * SHAPE.expert_bytes
    said = asked(section, 3 * resident_ms)
    assert f"({slow.experts / slow.total:.0%} of experts), by MoEpic" in said and "not measured" in said
    assert "Predictions so far" not in said
    keep_prediction(host.store.folder, "fake", Prediction(15.0, 20.0))
    assert "median 25% off over 1 answer" in asked(section, 3 * resident_ms)
    assert "No budget reaches" in asked(section, 0.9 * resident_ms)
    assert asked(section, 0) == asked(section, None) == ""
    blocked = host.loader.plan("demo", blocks=4)
    assert host.loader.least_memory(blocked, 3 * resident_ms).experts >= 2 * SHAPE.top_k, "the buffer is counted"


def test_the_least_memory_depends_on_the_link(host: Host) -> None:
    known(host)
    resident_ms = 0.1 + SHAPE.layers * 0.7
    found = []
    for gbps in (0.01, 10.0):
        assert host.models.change_many({"link": "emulated", "link_gbps": gbps}) == ""
        found.append(host.loader.least_memory(host.loader.plan("demo"), 1.5 * resident_ms).experts)
    assert found[0] > found[1]


def test_a_profile_without_curves_tells_nothing(host: Host) -> None:
    save(replace(measured(), curve_hit=None), profile_path(host.store.folder, "fake"))
    with pytest.raises(SettingError, match="no hit curves"):
        host.loader.least_memory(host.loader.plan("demo"), 40)
