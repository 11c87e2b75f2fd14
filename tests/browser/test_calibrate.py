"""Calibrate with the real engine: a profile ends with a summary, and what needs it can then be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard

FITS = "document.documentElement.scrollWidth <= innerWidth"


def only(dashboard: Dashboard, *parts: str) -> None:
    """Tick these parts alone."""
    page = dashboard.page
    boxes = page.locator("#calibration-parts label")
    for at in range(boxes.count()):
        box = boxes.nth(at)
        wanted = any(box.inner_text().strip().startswith(part) for part in parts)
        box.locator("input").set_checked(wanted)


@pytest.mark.long
def test_a_calibration_ends_with_a_summary_and_opens_what_needs_it(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        page.get_by_role("tab", name="Calibrate").click()
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        only(dashboard, "Activations", "Co-activations", "Default vectors", "Next-layer gate", "Gate entropy")
        page.locator("#calibration-limit input").fill("0")
        page.click("#calibration-go")
        page.wait_for_selector("#calibration-progress", state="visible")
        page.click("#calibration-cancel")
        dashboard.wait_text("#calibration-alert", "Cancelled")
        assert not list(server.home.glob("profiles/*"))
        page.locator("#calibration-limit input").fill("600")
        page.click("#calibration-go")
        dashboard.wait_text("#calibration-head", "Profile of Demo model")
        dashboard.wait_text("#calibration-head", "tokens of the bundled prompts")
        for figure in ("counts", "pairs", "entropy", "recall"):
            page.wait_for_selector(f"#profile-{figure} .plot-container .main-svg")
        dashboard.slide("profile-layer", 2)
        page.evaluate(
            "document.querySelector('#profile-layer input[type=range]').dispatchEvent("
            "new Event('pointerup', {bubbles: true}))"
        )
        dashboard.wait_text("#profile-pairs", "layer 2")
        assert len(list(server.home.glob("profiles/*.safetensors"))) == 1
        dashboard.choose("set-predictor", "Default vectors")
        page.wait_for_function("document.querySelector('#set-predictor input').value === 'Default vectors'")
        page.get_by_role("tab", name="Chat + Live").click()
        dashboard.ask("What does print do, in 40 words?").answered()
        page.get_by_role("tab", name="Calibrate").click()
        page.click("#profile-delete")
        page.wait_for_selector("#profile-confirm")
        page.click("#profile-delete-yes")
        page.wait_for_selector("#calibration-alert .notice.error")
        assert len(list(server.home.glob("profiles/*.safetensors"))) == 1, "what is chosen needs it"
        dashboard.choose("set-predictor", "None")
        page.wait_for_function("document.querySelector('#set-predictor input').value === 'None'")
        page.click("#profile-delete")
        page.click("#profile-delete-yes")
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        assert not list(server.home.glob("profiles/*.safetensors"))
        assert page.evaluate(FITS)
        server.end()
    finally:
        server.kill()
