"""Simple shows what everybody needs; the rest is one click away, explained to the keyboard."""

from __future__ import annotations

from tests.browser.dashboard import Dashboard

CONTROLS = """[...document.querySelectorAll('#model, [id^=set-]')].filter((e) => e.checkVisibility()
    && e.querySelector('input, textarea')).map((e) => e.id)"""
SHOWN = ["model", "set-preset", "set-budget", "set-sampling-temperature", "set-sampling-max_new_tokens"]
# Text that is wider than the box that hides the rest of it.
CUT = """[...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && e.clientWidth > 1
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.scrollWidth > e.clientWidth + 1
    && ['hidden', 'clip'].includes(getComputedStyle(e).overflowX)).map((e) => e.outerHTML.slice(0, 160))"""
LENGTH = "#set-sampling-max_new_tokens"


def test_simple_has_five_controls_and_help_that_the_keyboard_reaches(dashboard: Dashboard) -> None:
    page = dashboard.page
    assert page.evaluate(CONTROLS) == SHOWN
    helps = page.locator("#sidebar .has-info + .info-text:visible")
    assert helps.count() == len(SHOWN) and set(helps.evaluate_all("all => all.map((e) => e.tabIndex)")) == {0}
    page.locator("#model input").first.focus()
    page.keyboard.press("Tab")
    focused = "document.activeElement.matches('.info-text')"
    while not page.evaluate(focused):  # through the model's own buttons to the next control's help
        page.keyboard.press("Tab")
    told = page.evaluate("""() => { const e = document.activeElement, box = e.getBoundingClientRect();
        return [e.scrollWidth <= e.clientWidth, e.scrollHeight <= e.clientHeight, box.left >= 0, box.height > 24]; }""")
    assert told == [True] * 4
    page.keyboard.press("Escape")
    assert not page.evaluate(focused)
    assert page.evaluate(CUT) == []
    dashboard.advanced()
    page.wait_for_selector("#set-record_lab", state="visible")
    assert len(page.evaluate(CONTROLS)) > 20 and page.evaluate(CUT) == []


def test_a_range_over_decades_has_a_logarithmic_slider(dashboard: Dashboard) -> None:
    page = dashboard.page
    before, number, shown = (
        dashboard.value(f"{LENGTH} input[type=number]"),
        f"{LENGTH} input[type=number]",
        f"{LENGTH} .log",
    )
    page.wait_for_selector(shown)
    try:
        page.locator(shown).evaluate("e => { e.value = 500; e.dispatchEvent(new Event('input', { bubbles: true })); }")
        page.wait_for_function("(s) => document.querySelector(s).value === '180'", arg=number)  # half of 15 octaves
        page.locator(shown).focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("(s) => +document.querySelector(s).value > 180", arg=number)
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("(s) => +document.querySelector(s).value < 180", arg=number)
    finally:
        dashboard.slide(LENGTH.removeprefix("#"), float(before))
    page.wait_for_function("([s, is]) => document.querySelector(s).value === is", arg=[number, before])
    page.wait_for_function("(s) => +document.querySelector(s).value > 500", arg=shown)  # 256 is above the middle
