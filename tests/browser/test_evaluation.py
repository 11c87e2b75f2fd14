"""The tab Analysis with results: modes beside each other and a cancel, and the systems of the literature."""

import csv
import json
from pathlib import Path

import pytest

from tests.bench.systems_result import systems_result
from tests.browser.conftest import Open, Server
from tests.browser.dashboard import FITS, Dashboard


def quality(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.get_by_role("tab", name="Quality").click()
    dashboard.page.wait_for_selector("#evaluation-go:visible, #evaluation-cancel:visible")
    return dashboard


def only(dashboard: Dashboard, *titles: str) -> None:
    """Choose these modes alone."""
    page = dashboard.page
    page.locator("#evaluation-modes .remove-all").click()
    for title in titles:
        page.locator("#evaluation-modes input").fill(title)
        page.get_by_role("option", name=title, exact=True).click()
    page.keyboard.press("Escape")


@pytest.mark.long(0.3)  # tests/app/test_measurements.py and test_quality.py guard what it shows
def test_modes_beside_each_other_and_a_cancel(dashboard: Dashboard, open_page: Open) -> None:
    quality(dashboard)
    page = dashboard.page
    dashboard.wait_text("#evaluation-empty", "Nothing evaluated yet")
    page.locator("#evaluation-residencies").get_by_role("textbox").fill("2")
    page.click("#evaluation-go")
    dashboard.wait_text("#evaluation-alert", "not a share of the experts")
    page.locator("#evaluation-residencies").get_by_role("textbox").fill(".5")
    only(dashboard, "Exact", "Verify: default vectors")
    page.click("#evaluation-go")
    page.wait_for_selector("#evaluation-cancel", state="visible")
    page.wait_for_selector("#evaluation-table tbody tr")  # measured before it stands still
    dashboard.wait_text("#evaluation-head", "Not all modes")
    other = quality(open_page())
    other.page.wait_for_selector("#evaluation-cancel", state="visible")
    other.page.get_by_role("tab", name="Chat + Live").click()
    other.page.fill("#message textarea", "Hello")
    other.page.press("#message textarea", "Enter")
    other.page.wait_for_selector("text=The model is being evaluated")
    dashboard.page.click("#evaluation-cancel")
    dashboard.wait_text("#evaluation-alert", "Cancelled")
    only(dashboard, "Exact", "Drop")
    page.click("#evaluation-go")
    page.wait_for_function("document.querySelectorAll('#evaluation-table tbody tr').length === 2")
    page.wait_for_selector("#evaluation-plot .plot-container .main-svg")
    with page.expect_download() as download:
        page.click("#evaluation-csv")
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["mode"] for row in rows] == ["exact", "drop"]
    quality(other).page.wait_for_selector("#evaluation-table tbody tr")
    for width, height in ((390, 844), (1366, 768)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate(FITS), width


def beside(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.get_by_role("tab", name="A beside B").click()
    dashboard.page.wait_for_selector("#beside-go:visible, #beside-cancel:visible")
    return dashboard


def test_one_question_under_two_settings(dashboard: Dashboard) -> None:
    page = beside(dashboard).page
    dashboard.wait_text("#beside-empty", "Nothing compared yet")
    page.fill("#beside-question textarea", " ")
    page.click("#beside-go")
    dashboard.wait_text("#beside-alert", "Type a question")
    page.fill("#beside-question textarea", "Wait")
    page.click("#beside-go")
    dashboard.wait_text("#beside-progress", "Round 1 of 3: A")
    page.click("#beside-cancel")
    dashboard.wait_text("#beside-alert", "Cancelled")
    page.click("#beside-keep")
    page.locator("#beside-a input").click()
    page.get_by_role("option", name="Kept settings", exact=True).click()
    page.fill("#beside-question textarea", "Which city?")
    page.click("#beside-go")
    dashboard.wait_text("#beside-head", "A is faster")
    page.wait_for_selector("#beside-plot .plot-container .main-svg")
    dashboard.wait_text("#beside-table", "Time to the first token")
    with page.expect_download() as download:
        page.click("#beside-csv")
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "96,2.0,3.0"
    for width, height in ((390, 844), (1366, 768)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate(FITS), width


FILE = "systems-20260102-030405.json"


def systems(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.get_by_role("tab", name="Systems").click()
    return dashboard


@pytest.mark.long(0.3)
def test_the_newest_result_is_drawn_with_what_none_can_beat(open_page: Open, server: Server) -> None:
    result, results = systems_result(), server.home / "results"
    results.mkdir()
    try:
        dashboard = systems(open_page())
        dashboard.wait_text("#systems-empty", "No systems measured yet")
        assert "python launch.py bench systems" in dashboard.text("#systems-empty")
        assert not dashboard.page.is_visible("#systems-tpot")
        (results / FILE).write_text(json.dumps(result), encoding="utf-8")
        (results / FILE.replace("030405", "030406")).write_text(json.dumps({**result, "small": True}), encoding="utf-8")
        for scheme, width in (("dark", 1366), ("light", 390)):
            dashboard = systems(open_page(scheme=scheme, width=width, height=844))
            page = dashboard.page
            dashboard.wait_text("#systems-head", FILE)
            assert "12 tokens, 1 rounds" in dashboard.text("#systems-head")
            page.wait_for_selector("#systems-tpot .plot-container .main-svg")
            for name in ("FineMoE", "BuddyMoE (changes answers)"):
                dashboard.wait_text("#systems-tpot", name)
            assert page.locator("#systems-tpot .scatterlayer .trace").count() >= len(result["systems"]) + 1
            assert not page.is_visible("#systems-empty")
            assert page.evaluate(FITS)
    finally:
        for file in results.iterdir():
            file.unlink()
        results.rmdir()
