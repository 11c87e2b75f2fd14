"""Evaluating and comparing from the dashboard: settings come back, what was found is kept, exported and shown."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import host_state, jobs_state
from app.services.analysis.best import of_quality
from app.services.analysis.quality import QualityForm, QualityResult
from app.services.calibrator import Reading
from app.services.comparer import AS_KEPT, NOW, PLAIN, RESULT, Comparer, SidesQuestion, compare
from app.services.comparer import KEPT as KEPT_SETTINGS
from app.services.evaluator import KEPT
from app.services.host import Host
from app.services.jobs import Job
from app.services.remembered import Remembered
from app.ui.tabs import beside_views, quality_views
from core.errors import BusyError, MoestroError, SettingError
from core.measure.evaluate.rows import EvaluationRow
from core.settings.presets import PRESETS
from tests.app.conftest import WAIT_S, ended, open_host
from tests.fake_evaluation import ABOUT, FIGURES, fake_compare, fake_evaluate, started
from tests.fake_profiles import fake_calibrate

SMALL = QualityForm(("exact", "drop"), ".5,.25", 3, 9)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    started.clear()
    return open_host(tmp_path, calibrating=fake_calibrate, evaluating=fake_evaluate, comparing=fake_compare)


def asked(text: str = "Hi", a: str = NOW, b: str = AS_KEPT) -> SidesQuestion:
    return SidesQuestion(text, a, b, 48, 3)


# What starts a job that goes on until it is cancelled, what the model is then, and on which tab; what is left of it.
JOBS: dict[str, tuple[Callable[[Host], Job], str, str, Callable[[Host], object]]] = {
    "calibrator": (
        lambda host: host.calibrator.start(Reading(("text",), ("counts",), text="slow")),
        "calibrated",
        "Calibrate",
        lambda host: host.models.profile is None,
    ),
    "evaluator": (
        lambda host: host.evaluator.start(replace(SMALL, modes=("exact", "verify"))),
        "evaluated",
        "Analysis",
        lambda host: not host.evaluator.answer.whole and len(host.evaluator.answer.rows) == 1,
    ),
    "comparer": (
        lambda host: host.comparer.start(asked("Wait")),
        "compared under two settings",
        "Analysis",
        lambda host: host.comparer.answer is None,
    ),
}


@pytest.mark.parametrize("service", JOBS)
def test_the_model_is_a_job_s_own_until_it_is_cancelled(host: Host, service: str) -> None:
    start, doing, tab, left = JOBS[service]
    host.comparer.keep()
    host.models.change("budget", "70%")
    settings, stamp = host.models.settings, host_state(host)["settings"]
    job = start(host)
    assert (service == "calibrator" or started.wait(WAIT_S)) and host.busy
    assert host.models.settings == settings and host_state(host)["settings"] == stamp, "pages show the user's own"
    for refused in (
        lambda: host.chats.ask(None, "Hi"),
        lambda: host.chats.complete([{"role": "user", "content": "Hi"}], host.chats.sampling),
        host.models.unload,
        lambda: host.loader.load(host.loader.plan("demo")),
        host.calibrator.delete,
        lambda: start(host),
    ):
        with pytest.raises(BusyError, match=rf"being {doing}\b"):
            refused()
    with pytest.raises(BusyError, match=f"tab {tab}"):
        host.chats.ask(None, "Hi")
    assert service == "calibrator" or "changes the settings itself" in host.models.change("budget", "75%")
    getattr(host, service).cancel()
    assert ended(job).state == "cancelled" and host.models.settings == settings and not host.busy and left(host)
    assert host.models.change("budget", "75%") == "" and ended(host.chats.ask(None, "Hi")).error == ""


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


def test_what_is_wrong_is_said(host: Host) -> None:
    for form, why in (
        (replace(SMALL, modes=()), "at least one mode"),
        (replace(SMALL, modes=("magic",)), "no mode"),
        (replace(SMALL, residencies="2"), "not a share of the experts"),
    ):
        with pytest.raises(SettingError, match=why):
            host.evaluator.start(form)
    for question, why in (
        (asked(" "), "Type a question"),
        (SidesQuestion("Hi", NOW, NOW, 8), "32 to 512 tokens"),
        (SidesQuestion("Hi", NOW, "magic"), "magic"),
    ):
        with pytest.raises(SettingError, match=why):
            host.comparer.start(question)
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


@pytest.mark.parametrize(("ms", "best"), [(9.9, "Exact"), (5.0, "Drop")])
def test_the_cards_name_the_same_best_as_the_sentence_below(ms: float, best: str) -> None:
    exact = replace(rows()[0], tpot_ms=10.0, tpot_ms_se=0.1, tok_s=100.0, exact_match=0.5)
    drop = replace(exact, mode="drop", title="Drop", tpot_ms=ms, tok_s=1e3 / ms)
    answer = QualityResult(ABOUT, (exact, drop), whole=True)
    said, sentence = quality_views.summary(answer), of_quality(answer)
    assert (
        f"<b>{1e3 / ms if best == 'Drop' else 100:.1f} tok/s</b><small>{best} · " in said.split("Best without loss")[-1]
    )
    assert sentence is not None and ("exact mode is best" if best == "Exact" else "Drop is best") in sentence.text


def test_without_questions_agreement_stands_for_accuracy() -> None:
    plain = tuple(replace(row, exact_match=None, agreement=0.5 + 0.1 * at) for at, row in enumerate(rows()[:2]))
    answer = QualityResult({**ABOUT, "questions": {"seen": 0, "unseen": 0, "source": "none"}}, plain)
    assert quality_views.plot(answer, True).layout.yaxis.title.text == "Agreement with the exact model (%)"
    said = quality_views.summary(answer)
    assert "no questions" in said and "Not all modes" in said
    assert quality_views.plot(QualityResult(ABOUT, rows()[3:]), True) is None
    assert "Could not be run" in quality_views.listing(QualityResult(ABOUT, rows()[3:]))


def test_kept_settings_are_compared_with_the_sidebars_and_the_result_stays(host: Host, tmp_path: Path) -> None:
    client, stamp = TestClient(build_app(host), base_url="http://localhost"), jobs_state(host)["beside"]["stamp"]
    assert client.get("/export/beside.csv").status_code == 404
    assert AS_KEPT not in [name for _, name in host.comparer.choices()]
    host.comparer.keep()
    assert AS_KEPT in [name for _, name in host.comparer.choices()]
    kept = host.models.settings
    assert host.models.change("budget", "75%") == ""
    job = ended(host.comparer.start(asked(a=AS_KEPT, b=NOW)))
    assert (job.state, job.error) == ("done", "")
    found = host.comparer.answer
    assert found is not None and found.names == ("Kept settings", "The sidebar")
    assert found.differing == {"budget": (kept["budget"], "75%")} and host.models.settings["budget"] == "75%"
    assert jobs_state(host)["beside"]["stamp"] != stamp
    lines = client.get("/export/beside.csv").text.splitlines()
    assert lines[:2] == ["# A: Kept settings, B: The sidebar", "# link: emulated"]
    assert lines[2] == f"# budget: A {kept['budget']}, B 75%" and lines[-1] == "48,2.0,3.0"
    host.close()
    again = open_host(tmp_path, loaded=False, comparing=fake_compare)
    assert again.comparer.answer == found and again.comparer.kept == kept
    again.store.db.put(RESULT, {"a": 1})
    again.close()
    assert open_host(tmp_path, loaded=False).comparer.answer is None


def test_a_preset_is_compared_at_the_budget_in_force(host: Host) -> None:
    host.models.change("budget", "75%")
    compared = 0
    for one in PRESETS:
        job = ended(host.comparer.start(asked(b=one.name)))
        if job.state == "error":
            assert "profile" in job.error or "calibrat" in job.error.lower(), job.error
            continue
        found = host.comparer.answer
        assert found is not None and found.names == ("The sidebar", one.title)
        assert "budget" not in found.differing
        now = host.models.settings
        expected = {name: (now[name], value) for name, value in one.values.items() if name != "budget"}
        assert found.differing == {name: pair for name, pair in expected.items() if pair[0] != pair[1]}
        compared += 1
    assert compared > len(PRESETS) / 2


def test_plain_is_what_no_preset_has_changed(host: Host) -> None:
    host.models.change_many({"budget": "75%", "eviction": "lfu", "predictor": "recent"})
    ended(host.comparer.start(asked(b=PLAIN)))
    found = host.comparer.answer
    assert found is not None and found.differing.keys() >= {"eviction", "predictor"}
    assert [found.differing[name][1] for name in ("eviction", "predictor")] == ["lru", "none"]
    assert "budget" not in found.differing


def test_the_page_says_which_is_faster_and_whether_they_say_the_same(host: Host) -> None:
    ended(host.comparer.start(asked(b=NOW)))
    found = host.comparer.answer
    assert found is not None
    text = beside_views.summary(found)
    assert "the same settings" in text and "emulated link" in text
    assert "500.0 tok/s" in text and "333.3 tok/s" in text and "1.50" in text and "A is faster" in text
    assert "identical" in text and "all 48 tokens, bit for bit" in text
    figure = beside_views.plot(found, dark=True)
    assert [list(trace.y) for trace in figure.data] == [[2.0] * 48, [3.0] * 48]
    host.models.change_many({"miss": "drop"})
    host.comparer.keep()
    host.models.change_many({"miss": "wait"})
    ended(host.comparer.start(asked()))
    found = host.comparer.answer
    assert found is not None
    text = beside_views.summary(found)
    assert "Same likeliest token" in text and "93.8 %" in text and "KL 0.012" in text
    listing = beside_views.listing(found)
    assert "<td>Wait for it (exact)</td><td>Leave it out</td>" in listing and "An &lt;answer&gt;" in listing


def test_kept_settings_of_a_version_with_other_variants_are_forgotten(host: Host) -> None:
    remembered = Remembered(host.store.db)
    remembered.put(KEPT_SETTINGS, {"predictor": "token_table", "predictor.token_table.width": 3})
    assert Comparer(remembered, host.models, host.jobs, compare).kept is None
