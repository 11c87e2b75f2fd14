"""The plan of the cache, with the real engine: used, and taken back; planning while idle; and the least memory for a
time per token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.test_calibrate import only


@pytest.mark.long
def test_a_plan_is_used_and_undone(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        dashboard.advanced()
        page.locator("#fit-target input").fill("1000")
        page.press("#fit-target input", "Enter")
        dashboard.wait_text("#fit-needed", "There are no hit curves and times of this model yet")
        page.click("#fit-needed [data-open='tab-calibrate']")
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        only(dashboard, "Activations", "Hit curves", "Measured times")
        page.locator("#calibration-limit input").fill("600")
        page.click("#calibration-go")
        dashboard.wait_text("#calibration-head", "Profile of Demo model")
        page.locator("#fit-target input").fill("999")
        page.press("#fit-target input", "Enter")
        dashboard.wait_text("#fit-needed", "For 999 ms per token: at least")
        page.click("#plan-go")
        dashboard.wait_text("#plan-said", "Hit curves from calibration")
        assert not page.is_visible("#plan-undo")
        page.click("#plan-use")
        dashboard.wait_text("#plan-said", "Measured waiting a token")
        page.wait_for_selector("#plan-use", state="hidden")
        page.wait_for_function("document.querySelector('#set-layer_slots input').value.includes('plan')")
        page.click("#plan-undo")
        page.wait_for_selector("#plan-undo", state="hidden")
        page.wait_for_function("!document.querySelector('#set-layer_slots input').value.includes('plan')")
        with page.expect_response("**/run/predict*"):
            page.get_by_label("Plan again while idle").check()
        dashboard.goto()
        page.get_by_role("tab", name="Calibrate").click()
        page.wait_for_function("document.querySelector('#plan-idle input')?.checked")
        server.end()
    finally:
        server.kill()
