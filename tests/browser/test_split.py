"""Split experts with the real engine: theta moves while an answer is written, and a plan is made, used and undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.test_calibrate import only

COUNTED = "document.querySelector('[data-k=res-legend] li:has(.part)').innerText.replace(/\\D/g, '') > 0"


@pytest.mark.long
def test_theta_moves_mid_answer_and_a_plan_is_used_and_undone(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        dashboard.advanced()
        assert not page.is_visible("#set-split"), "whole experts cannot be kept in part"
        dashboard.type_in("set-blocks", "5")
        dashboard.wait_text("#fit", "cannot be cut into 5 equal blocks")
        dashboard.type_in("set-blocks", "3")
        dashboard.wait_text("#fit", "Fits")
        dashboard.load()
        page.wait_for_selector("#set-split", state="visible")
        dashboard.ask("Count as far as you can.").streaming()
        dashboard.expect_mark(lambda: dashboard.choose("set-split", "The same part"), "split")
        page.wait_for_function(COUNTED)  # the map's legend counts experts that are there in part
        dashboard.expect_mark(lambda: dashboard.slide("set-split-uniform-theta", 0.3), "split.uniform.theta")
        before = len(dashboard.tail())
        page.wait_for_function("(before) => document.querySelector('.tail').innerText.length > before + 40", arg=before)
        dashboard.stop()
        page.get_by_role("tab", name="Calibrate").click()
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        only(dashboard, "Activations", "Hit curves", "Measured times")
        page.locator("#calibration-limit input").fill("600")
        page.click("#calibration-go")
        dashboard.wait_text("#calibration-head", "Profile of Demo model")
        page.click("#plan-go")
        page.wait_for_selector("#plan-figure .plot-container .main-svg")
        dashboard.wait_text("#plan-said", "Predicted by MoEpic's latency model")
        dashboard.wait_text("#plan-said", "Even, halves")
        page.locator("#plan-target input").fill("1000")
        page.click("#plan-least")
        dashboard.wait_text("#plan-found", "of 192 experts")
        page.click("#plan-use")
        dashboard.wait_text("#plan-said", "Measured waiting a token")
        page.wait_for_function("document.querySelector('#set-split input').value.includes('plan')")
        page.get_by_role("tab", name="Chat + Live").click()
        dashboard.ask("What does print do, in 30 words?").answered()
        page.get_by_role("tab", name="Calibrate").click()
        page.click("#plan-undo")
        page.wait_for_selector("#plan-undo", state="hidden")
        page.wait_for_function("document.querySelector('#set-split input').value === 'The same part'")
        server.end()
    finally:
        server.kill()
