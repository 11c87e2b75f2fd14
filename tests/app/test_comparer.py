"""Two settings beside each other, from the dashboard: which sides there are, what is shown, and what is kept."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.live_state import jobs_state
from app.services.comparer import AS_KEPT, KEPT, NOW, PLAIN, RESULT, Comparer, SidesQuestion, compare
from app.services.host import Host
from app.services.remembered import Remembered
from app.ui.tabs import beside_views
from core.errors import BusyError, SettingError
from core.settings.presets import PRESETS
from tests.app.conftest import WAIT_S, ended, open_host
from tests.fake_evaluation import fake_compare, started


@pytest.fixture
def host(tmp_path: Path) -> Host:
    started.clear()
    return open_host(tmp_path, comparing=fake_compare)


def asked(text: str = "Hi", a: str = NOW, b: str = AS_KEPT) -> SidesQuestion:
    return SidesQuestion(text, a, b, 48, 3)


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


def test_kept_settings_of_a_version_with_other_variants_are_forgotten(host: Host) -> None:
    remembered = Remembered(host.store.db)
    remembered.put(KEPT, {"predictor": "token_table", "predictor.token_table.width": 3})
    assert Comparer(remembered, host.models, host.jobs, compare).kept is None


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


def test_the_engine_is_its_own_meanwhile_and_cancelling_gives_it_back(host: Host) -> None:
    host.comparer.keep()
    host.models.change("budget", "75%")
    settings = host.models.settings
    job = host.comparer.start(asked("Wait"))
    assert started.wait(WAIT_S) and host.busy and host.models.settings == settings
    with pytest.raises(BusyError, match="being compared under two settings"):
        host.chats.ask(None, "Hi")
    assert "changes the settings itself" in host.models.change("budget", "25%")
    host.comparer.cancel()
    assert ended(job).state == "cancelled" and host.models.settings == settings and host.comparer.answer is None


def test_what_is_wrong_is_said(host: Host) -> None:
    for one, why in (
        (asked(" "), "Type a question"),
        (SidesQuestion("Hi", NOW, NOW, 8), "32 to 512 tokens"),
        (SidesQuestion("Hi", NOW, "magic"), "magic"),
    ):
        with pytest.raises(SettingError, match=why):
            host.comparer.start(one)


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
