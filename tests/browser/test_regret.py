"""The regret meter on the deck: it follows the chat, one click takes its advice, and a switch removes it."""

from __future__ import annotations

import pytest

from core.settings.registry import variants
from tests.browser.dashboard import Dashboard

STATE = "document.querySelector('.deck').dataset.regret"


def _state(dashboard: Dashboard, wanted: str) -> None:
    dashboard.page.wait_for_function(f"{STATE} === '{wanted}'")


def test_it_compares_while_chatting_and_one_click_applies_the_best(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.choose("set-eviction", "None (on demand)")  # whatever else is better ...
    dashboard.choose("set-predictor", "Previous token")  # ... without what prefetching adds
    dashboard.ask("Compare").streaming(20)
    _state(dashboard, "ready")
    told = dashboard.text("[data-k=regret-text]")
    assert told.startswith("None (on demand) ")
    for part in ("(0 % without prefetching)", "highest other: ", "Belady (forced admission) ", " tokens"):
        assert part in told
    canvas = page.locator(".deck canvas[data-c=regret]")
    canvas.scroll_into_view_if_needed()
    colours = canvas.evaluate(
        """c => { const image = c.getContext('2d').getImageData(0, 0, c.width, c.height);
        return new Set(new Uint32Array(image.data.buffer)).size; }"""
    )
    assert colours > 3
    canvas.hover(position={"x": 60, "y": 28})
    page.wait_for_function(  # which is best may change with every token
        "titles => titles.some((t) => document.querySelector('.deck-tip')?.innerText.includes(`% ${t}`))",
        arg=[one.title for one in variants("eviction") if one.name != "none"],
    )
    page.mouse.move(2, 2)
    canvas.focus()
    page.keyboard.press("ArrowDown")
    assert "chosen" in page.evaluate("document.querySelector('[data-k=say]').textContent")
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-k=regret-use]", state="visible")
    advised = page.evaluate(  # in one moment: what it advises may be another policy in the next
        """() => { const button = document.querySelector('[data-k=regret-use]'), { textContent } = button;
        button.click(); return textContent.replace('Use ', ''); }"""
    )
    page.wait_for_function("([t]) => document.querySelector('#set-eviction input').value === t", arg=[advised])
    page.wait_for_function(
        "([t]) => document.querySelector('[data-k=regret-text]').textContent.startsWith(t)", arg=[advised]
    )
    dashboard.stop()
    assert any(text.startswith("eviction none") for text in dashboard.marks())
    dashboard.choose("set-eviction", "LRU")
    dashboard.choose("set-predictor", "None")


@pytest.mark.long(0.1)
def test_the_switch_removes_it_and_brings_it_back(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.wait_for_selector("[data-k=regret]", state="visible")
    dashboard.advanced()
    page.locator("#set-regret input").uncheck()
    _state(dashboard, "off")
    page.wait_for_selector("[data-k=regret]", state="hidden")
    dashboard.ask("Without").streaming(20)
    dashboard.stop()
    assert dashboard.frame()["regret"] is None
    page.locator("#set-regret input").check()
    page.wait_for_selector("[data-k=regret]", state="visible")
    dashboard.ask("With").streaming(20)
    _state(dashboard, "ready")
    dashboard.stop()
