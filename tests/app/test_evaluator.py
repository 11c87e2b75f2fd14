"""Evaluating from the dashboard: the engine is its own meanwhile, settings come back, and what was found is shown."""

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import host_state, jobs_state
from app.services.analysis.quality import QualityForm, QualityResult
from app.services.evaluator import KEPT
from app.services.host import Host
from app.ui.tabs import quality_views
from core.errors import BusyError, MoestroError, SettingError
from core.measure.evaluate.rows import EvaluationRow
from tests.app.conftest import WAIT_S, ended, open_host
from tests.fake_evaluation import ABOUT, FIGURES, fake_evaluate, started
from tests.fake_profiles import fake_calibrate

SMALL = QualityForm(("exact", "drop"), ".5,.25", 3, 9)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    started.clear()
    return open_host(tmp_path, calibrating=fake_calibrate, evaluating=fake_evaluate)


def test_rows_are_found_kept_and_exported(host: Host, tmp_path: Path) -> None:
    client, stamp = TestClient(build_app(host), base_url="http://localhost"), jobs_state(host)["evaluation"]["stamp"]
    assert client.get("/export/quality.csv").status_code == 404
    settings = host.models.settings
    job = ended(host.evaluator.start(SMALL))
    assert (job.state, job.error, job.share) == ("done", "", 1.0) and host.models.settings == settings
    answer = host.evaluator.answer
    assert (
        answer is not None
        and answer.whole
        and [row.key for row in answer.rows] == [("exact", 0.5), ("drop", 0.5), ("exact", 0.25), ("drop", 0.25)]
    )
    state = jobs_state(host)["evaluation"]
    assert state["stamp"] != stamp and state["state"] == "done" and not host.busy
    text = client.get("/export/quality.csv").text
    assert "# link: emulated" in text and text.splitlines()[-1].startswith("drop,Drop,0.25,")
    host.close()
    again = open_host(tmp_path, loaded=False, evaluating=fake_evaluate)
    assert again.evaluator.answer == answer
    again.store.db.put(KEPT, {"rows": []})
    again.close()
    assert open_host(tmp_path, loaded=False).evaluator.answer is None


def test_the_engine_is_its_own_meanwhile_and_cancelling_gives_it_back(host: Host) -> None:
    settings, stamp = host.models.settings, host_state(host)["settings"]
    job = host.evaluator.start(replace(SMALL, modes=("exact", "verify")))
    assert started.wait(WAIT_S) and host.busy
    assert host.models.settings == settings and host_state(host)["settings"] == stamp, "pages show the user's own"
    with pytest.raises(BusyError, match=r"being evaluated \(25%\)\. .*tab Analysis"):
        host.chats.ask(None, "Hi")
    for what in (
        host.models.unload,
        lambda: host.loader.load(host.loader.plan("demo")),
        host.calibrator.delete,
        lambda: host.evaluator.start(SMALL),
    ):
        with pytest.raises(BusyError, match="being evaluated"):
            what()
    assert "changes the settings itself" in host.models.change("budget", "75%")
    host.evaluator.cancel()
    assert ended(job).state == "cancelled" and host.models.settings == settings and not host.busy
    answer = host.evaluator.answer
    assert answer is not None and not answer.whole and len(answer.rows) == 1
    assert host.models.change("budget", "75%") == "" and host.models.settings["budget"] == "75%"
    assert host.chats.ask(None, "Hi").join(WAIT_S)


def test_what_is_wrong_is_said(host: Host) -> None:
    for asked, why in (
        (replace(SMALL, modes=()), "at least one mode"),
        (replace(SMALL, modes=("magic",)), "no mode"),
        (replace(SMALL, residencies="2"), "not a share of the experts"),
    ):
        with pytest.raises(SettingError, match=why):
            host.evaluator.start(asked)
    job = ended(host.evaluator.start(replace(SMALL, modes=("random",))))
    assert (job.state, job.error) == ("error", "No luck.") and not host.busy
    host.models.unload()
    with pytest.raises(MoestroError, match="No model is loaded"):
        host.evaluator.start(SMALL)


def rows() -> tuple[EvaluationRow, ...]:
    exact = EvaluationRow("exact", "Exact", 0.5, **FIGURES)
    return (
        exact,
        replace(exact, mode="drop", title="Drop", exact_match=0.5, exact_match_se=0.3, tok_s=80.0),
        replace(exact, mode="slow", title="Slow & lossy", exact_match=0.9, tok_s=20.0),
        EvaluationRow("buddy_rho1", "Buddies, rho 1", 0.5, problem="It needs a <profile>."),
    )


@pytest.mark.parametrize("dark", [True, False])
def test_the_front_stands_out(dark: bool) -> None:
    answer = QualityResult(ABOUT, rows(), whole=True)
    assert {share: [row.mode for row in rows] for share, rows in quality_views.fronts(answer).items()} == {
        0.5: ["drop", "exact"]
    }
    drawn = quality_views.plot(answer, dark)
    line, points = drawn.data
    assert (list(line.x), list(line.y)) == ([80.0, 50.0], [50.0, 100.0])
    assert list(points.text) == ["Exact", "Drop", ""] and "emulated" in drawn.layout.title.text
    table = quality_views.listing(answer)
    assert (
        table.count("<tr class='chosen'>") == 2
        and "Slow &amp; lossy" in table
        and "50.0 % (" in table
        and "± " not in table
    )
    assert "<dt>Buddies, rho 1</dt><dd>It needs a &lt;profile&gt;.</dd>" in table
    said = quality_views.summary(answer)
    assert "a &lt;text&gt;" in said and "No profile" in said and "Not all modes" not in said
    assert "emulated link" in said and "Exact at 50 %" in said and "<b>80.0 tok/s</b>" in said


def test_without_questions_agreement_stands_for_accuracy() -> None:
    plain = tuple(replace(row, exact_match=None, agreement=0.5 + 0.1 * at) for at, row in enumerate(rows()[:2]))
    answer = QualityResult({**ABOUT, "questions": {"seen": 0, "unseen": 0, "source": "none"}}, plain)
    assert quality_views.plot(answer, True).layout.yaxis.title.text == "Agreement with the exact model (%)"
    said = quality_views.summary(answer)
    assert "no questions" in said and "Not all modes" in said
    assert quality_views.plot(QualityResult(ABOUT, rows()[3:]), True) is None
    assert "Could not be run" in quality_views.listing(QualityResult(ABOUT, rows()[3:]))
