"""The page on a phone, a laptop and a large screen, dark and light: it fits, it is not blank, nothing is unlabelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.browser.conftest import Open
from tests.browser.dashboard import Dashboard

FITS = "document.documentElement.scrollWidth <= innerWidth"
SIZES = {390: 844, 1366: 768, 1920: 1080}
# What is chosen in a menu, or written in a field, and does not fit into it.
SHORTENED = """[...document.querySelectorAll('textarea, input:not([type=range], [type=checkbox], [type=radio])')]
    .filter((e) => e.checkVisibility() && e.clientWidth > 1 && e.value && e.scrollWidth > e.clientWidth + 1)
    .map((e) => [e.value, e.scrollWidth, e.clientWidth])"""
ON_SCREEN = """['#chat-title b', '#send', '#context .gauge'].every((s) => {
    const box = document.querySelector(s).getBoundingClientRect();
    return box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; })"""


@pytest.mark.long(0.2)
@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (1920, "dark")])
def test_fits_the_screen(open_page: Open, tmp_path: Path, width: int, scheme: str) -> None:
    fits(open_page(width=width, height=SIZES[width], scheme=scheme), tmp_path, width, scheme)


def fits(dashboard: Dashboard, tmp_path: Path, width: int, scheme: str) -> None:
    dashboard.ask("How does the expert cache behave?").streaming(60)
    picture = tmp_path / f"{width}-{scheme}.png"
    dashboard.page.screenshot(path=str(picture))
    dashboard.stop()
    assert dashboard.page.evaluate(FITS)
    assert width == 390 or dashboard.page.evaluate(ON_SCREEN), "the composer and what it says are in sight"
    assert dashboard.page.evaluate("document.querySelector('#chat-title b').clientWidth") >= 160, "a name to read"
    with Image.open(picture) as image:
        assert len(image.convert("RGB").resize((200, 200)).getcolors(40_000) or ()) > 50
        corner = image.convert("L").crop((width - 4, SIZES[width] - 4, width, SIZES[width])).getextrema()[1]
    assert (int(str(corner)) < 80) == (scheme == "dark")
    for tab, part in (
        ("Library", "#import-form"),
        ("Calibrate", "#calibration-go"),
        ("Analysis", "#whatif-go"),
        ("Batch", "#batch-go"),
        ("Sessions", "#sessions"),
    ):
        dashboard.page.get_by_role("tab", name=tab).click()
        dashboard.page.wait_for_selector(part)
        assert dashboard.page.evaluate(FITS), tab
        assert dashboard.page.evaluate(SHORTENED) == [], tab


def test_every_control_has_a_name(dashboard: Dashboard) -> None:
    dashboard.advanced()
    nameless = dashboard.page.evaluate("""() => {
        const named = (e) => e.getAttribute('aria-label') || e.innerText.trim() || e.closest('label') || e.title
            || (e.id && document.querySelector(`label[for='${e.id}']`));
        return [...document.querySelectorAll('input, textarea, select, button')]
            .filter((e) => e.offsetParent && !named(e)).map((e) => e.outerHTML.slice(0, 120)); }""")
    assert nameless == []
