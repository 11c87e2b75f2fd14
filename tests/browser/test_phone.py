"""On a phone the page fits, nothing of a chat is cut off, a finger hits every control. One page for all of these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Pages, Server
from tests.browser.dashboard import Dashboard
from tests.browser.test_chats import whole
from tests.browser.test_looks import FITS, fits

# What a finger hits of a control: itself, or the label around it.
SMALL = """[...document.querySelectorAll('button, select, textarea, input, [role=tab], a[href]')].filter((e) => {
    const box = e.getBoundingClientRect(), label = e.closest('label')?.getBoundingClientRect() ?? box;
    const seen = e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && box.width > 1
        && getComputedStyle(e).pointerEvents !== 'none' && !e.closest('p, dd');
    return seen && Math.min(Math.max(box.height, label.height), Math.max(box.width, label.width)) < 23.5;
    }).map((e) => [e.outerHTML.slice(0, 140), e.offsetWidth, e.offsetHeight])"""


@pytest.fixture(scope="module")
def shared(profile: Any, server: Server) -> Iterator[Dashboard]:
    pages = Pages(profile, server)
    yield pages.open(width=390, height=844)
    pages.close()
    pages.check()


@pytest.fixture
def phone(shared: Dashboard) -> Iterator[Dashboard]:
    """The page with an empty chat, in the dark."""
    shared.page.keyboard.press("Escape")
    shared.page.get_by_role("tab", name="Chat + Live").click()
    yield shared.emptied()
    shared.rest()


@pytest.mark.long(0.1)  # test_batch.py and test_substitution.py have pages of this width, the test below every tab
def test_it_fits_and_is_not_blank(phone: Dashboard, tmp_path: Path) -> None:
    fits(phone, tmp_path, 390, "dark")
    assert phone.page.evaluate("document.querySelector('#load').getBoundingClientRect().right <= 0")


@pytest.mark.long(0.1)  # test_chats.py, on a desktop; here every target's size
def test_nothing_of_the_chat_is_cut_off_or_too_small(phone: Dashboard) -> None:
    whole(phone)
    phone.page.click("button[data-chats]")
    phone.page.wait_for_selector("#chat-list", state="hidden")


def test_every_target_is_large_enough(phone: Dashboard) -> None:
    page = phone.page
    for tab in ("Chat + Live", "Library", "Calibrate", "Analysis", "Batch", "Sessions"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate(SMALL) == [], tab
        assert page.evaluate(FITS), tab
    page.locator(".sidebar .toggle-button").click()
    phone.advanced()
    page.wait_for_selector("#set-record_lab", state="visible")
    assert page.evaluate(SMALL) == []
    page.locator("#mode").get_by_text("Simple", exact=True).click()
    page.locator(".sidebar .toggle-button").click()
