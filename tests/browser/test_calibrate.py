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


def slid(dashboard: Dashboard, element: str, value: float) -> None:
    """Drag a slider and let it go."""
    dashboard.slide(element, value)
    dashboard.page.evaluate(
        "id => document.querySelector(`#${id} input[type=range]`).dispatchEvent("
        "new Event('pointerup', {bubbles: true}))",
        element,
    )


@pytest.mark.long
def test_a_calibration_ends_with_a_summary_and_opens_what_needs_it(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        page.get_by_role("tab", name="Calibrate").click()
        dashboard.wait_text("#calibration-empty", "Not calibrated yet")
        only(
            dashboard,
            "Activations",
            "Co-activations",
            "Alike experts",
            "Default vectors",
            "Next-layer gate",
            "Gate entropy",
        )
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
        for figure in ("counts", "pairs", "similarity", "lengths", "coverage", "entropy", "recall"):
            page.wait_for_selector(f"#profile-{figure} .plot-container .main-svg")
        slid(dashboard, "profile-layer", 2)
        for figure in ("pairs", "similarity", "lengths", "coverage"):
            dashboard.wait_text(f"#profile-{figure}", "layer 2")
        dashboard.choose("profile-measure", "Share of co-activations")
        dashboard.wait_text("#profile-similarity", "Share of co-activations in layer 2")
        dashboard.wait_text("#profile-lengths", "alpha 0.95")
        slid(dashboard, "profile-alpha", 0.5)
        dashboard.wait_text("#profile-lengths", "alpha 0.5")
        dashboard.wait_text("#profile-coverage", "shown")
        dashboard.wait_text("#profile-lists-said", "At most 16")
        assert page.locator("#profile-lists-table tbody tr").count() == 6
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
