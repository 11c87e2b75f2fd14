"""The systems of the literature in the tab Analysis: what a bench measured, drawn, or how to measure it."""

from __future__ import annotations

import json

import pytest

from tests.bench.systems_result import systems_result
from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard

FILE = "systems-20260102-030405.json"
FITS = "document.documentElement.scrollWidth <= innerWidth"


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
