"""With the real engine: plans used and taken back, split experts, and what is turned while a prompt is read."""

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.test_jobs import only


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


SLOWEST = """() => { const range = document.querySelector('#set-link_gbps input[type=range]');
    range.value = range.min; range.dispatchEvent(new Event('input', {bubbles: true})); }"""


@pytest.mark.long(0.5)
def test_a_knob_turned_while_a_prompt_is_read_is_not_lost(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        dashboard.advanced()
        dashboard.choose("set-link", "emulated")
        page.wait_for_selector("#set-link_gbps", state="visible")
        page.evaluate(SLOWEST)
        dashboard.ask("Which of them is used? " * 20)
        dashboard.wait_text(".tail", "Reading the prompt")
        bypass = page.locator("#set-bypass input")
        before = bypass.is_checked()
        dashboard.reach("set-bypass")
        bypass.click()
        page.wait_for_function("document.querySelector('.tail').innerText.includes('Reading the prompt')")
        dashboard.stop()
        assert bypass.is_checked() != before
        dashboard.choose("set-link", "auto")
        dashboard.ask("Hello").streaming()
        assert any(mark.startswith("bypass") for mark in dashboard.marks()), dashboard.marks()
        assert bypass.is_checked() != before
    finally:
        server.kill()
