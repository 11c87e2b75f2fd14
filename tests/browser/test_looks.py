"""The page on a phone, a laptop and a large screen, dark and light: it fits, it is not blank, nothing is unlabelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.browser.conftest import Open
from tests.browser.dashboard import Dashboard
from tests.selection import layered

FITS = "document.documentElement.scrollWidth <= innerWidth"
SIZES = {390: 844, 1366: 768, 1920: 1080}


@pytest.mark.parametrize(
    ("width", "scheme"),
    layered([(390, "dark"), (1366, "light"), (1920, "dark")], quick=lambda screen: screen[0] == 390),
)
def test_fits_the_screen(open_page: Open, tmp_path: Path, width: int, scheme: str) -> None:
    dashboard = open_page(width=width, height=SIZES[width], scheme=scheme)
    dashboard.ask("How does the expert cache behave?").streaming(60)
    picture = tmp_path / f"{width}-{scheme}.png"
    dashboard.page.screenshot(path=str(picture))
    dashboard.stop()
    assert dashboard.page.evaluate(FITS)
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
    if width == 390:
        assert dashboard.page.evaluate("document.querySelector('#load').getBoundingClientRect().right <= 0")


def test_every_control_has_a_name(dashboard: Dashboard) -> None:
    dashboard.advanced()
    nameless = dashboard.page.evaluate("""() => {
        const named = (e) => e.getAttribute('aria-label') || e.innerText.trim() || e.closest('label') || e.title
            || (e.id && document.querySelector(`label[for='${e.id}']`));
        return [...document.querySelectorAll('input, textarea, select, button')]
            .filter((e) => e.offsetParent && !named(e)).map((e) => e.outerHTML.slice(0, 120)); }""")
    assert nameless == []
