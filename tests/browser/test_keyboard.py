"""The page by keyboard alone: how far the chat is, menus that close, and a focus that is never lost."""

import pytest

from tests.browser.conftest import Open
from tests.browser.dashboard import SIZES, Dashboard

MOST = 10  # stops from the opened page to the chat's input
WRITING = "document.activeElement.matches('#message textarea')"
FROM_THE_TOP = "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"


@pytest.mark.parametrize("width", [pytest.param(w, marks=() if w == 1366 else pytest.mark.long(0.2)) for w in SIZES])
def test_the_chat_is_reached_from_an_opened_page_in_ten_stops(open_page: Open, width: int) -> None:
    """It has the focus as the page opens; from the top of the page a link leads to it."""
    dashboard = open_page(width=width, height=SIZES[width])
    page, stops = dashboard.page, 0
    page.wait_for_function(WRITING)
    page.evaluate(FROM_THE_TOP)
    while not page.evaluate("document.activeElement.matches('[data-skip]')"):
        page.keyboard.press("Tab")
        stops += 1
        assert stops < MOST and page.evaluate("document.activeElement !== document.body"), stops
    page.keyboard.press("Enter")
    page.wait_for_function(WRITING)
    print(f"\n{width} px: the link to the message is stop {stops}")


def test_the_export_menu_closes_as_the_focus_leaves(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask("One, in 3 words").answered()
    page.focus("#export-menu")
    page.keyboard.press("Enter")
    page.wait_for_selector("#export-markdown", state="visible")
    for link in ("export-markdown", "export-json", "csv", "export-timeline"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == link
    page.keyboard.press("Tab")
    page.wait_for_selector("#export-markdown", state="hidden")
    assert page.evaluate("document.activeElement !== document.body")


@pytest.mark.long(0.1)
def test_a_continued_answer_keeps_the_focus(dashboard: Dashboard) -> None:
    """Its button goes with the answer, while that is written; what comes next gets the focus."""
    page = dashboard.page
    dashboard.ask("One, in 5 words").answered()
    page.focus('#chat [data-act="continue"]')
    page.keyboard.press("Enter")
    dashboard.wait_text("#chat .bot-row .line", "more, after 5")
    dashboard.answered()
    assert page.evaluate("document.activeElement !== document.body")
