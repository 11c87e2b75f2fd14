"""The page on a phone, a laptop and a large screen: it fits, nothing is unlabelled, and Simple shows what all need."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.ui.sidebar.preset_menu import LISTS, was
from core.settings.presets import PRESETS
from tests.browser.conftest import Open, Pages, Server
from tests.browser.dashboard import FITS, SIZES, Dashboard
from tests.browser.lengths import say

# What is chosen in a menu, or written in a field, and does not fit into it.
SHORTENED = """[...document.querySelectorAll('textarea, input:not([type=range], [type=checkbox], [type=radio])')]
    .filter((e) => e.checkVisibility() && e.clientWidth > 1 && e.value && e.scrollWidth > e.clientWidth + 1)
    .map((e) => [e.value, e.scrollWidth, e.clientWidth])"""
ON_SCREEN = """['#chat-title b', '#send', '#context .gauge'].every((s) => {
    const box = document.querySelector(s).getBoundingClientRect();
    return box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; })"""
SMALL_IN_CHAT = """() => [...document.querySelectorAll('#chat-column :is(button, summary), #chat-list-column button')]
    .filter((e) => e.offsetParent && getComputedStyle(e).visibility === 'visible')
    .map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
    .filter(([, box]) => box.width < 24 || box.height < 24).map(([html]) => html)"""
# The message field, or the button that is drawn over by nothing of the chat's head.
CUT_OFF = """() => [...document.querySelectorAll('#chat-head button, #chat-head summary')].filter((e) => e.offsetParent)
    .filter((e) => { e.scrollIntoView({ block: "center" }); const box = e.getBoundingClientRect();
        const seen = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return box.right > innerWidth || !e.contains(seen); }).map((e) => e.outerHTML.slice(0, 80))"""


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
        ("System", "#system-tab"),
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


CONTROLS = """[...document.querySelectorAll('#model, #simulate-pcie, [id^=set-]')].filter((e) => e.checkVisibility()
    && e.querySelector('input, textarea')).map((e) => e.id)"""
SHOWN = [
    "set-preset",
    "set-budget",
    "simulate-pcie",
    "set-sampling-temperature",
    "set-sampling-max_new_tokens",
    "model",
]
# Text that is wider than the box that hides the rest of it.
CUT = """[...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && e.clientWidth > 1
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.scrollWidth > e.clientWidth + 1
    && ['hidden', 'clip'].includes(getComputedStyle(e).overflowX)).map((e) => e.outerHTML.slice(0, 160))"""
# Words and buttons of the top bar, the chat's head, the key figures and the verdict that lie over one another.
OVERLAPS = """() => ['#top-bar', '#chat-head', '.kpis', '#fit'].flatMap((part) => {
    const own = (e) => e.matches('button, summary') || [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const all = [...document.querySelectorAll(`${part} *`)].filter((e) => e.checkVisibility() && e.clientWidth > 1
        && own(e)).map((e) => [e, e.getBoundingClientRect()]);
    return all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) => !a.contains(b) && !b.contains(a)
        && Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
        && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1).map(([b]) => [a.outerHTML, b.outerHTML]));
    })"""
LENGTH = "#set-sampling-max_new_tokens"


def test_simple_has_six_controls_and_help_that_the_keyboard_reaches(dashboard: Dashboard) -> None:
    page = dashboard.page
    assert page.evaluate(CONTROLS) == SHOWN
    helps = page.locator(":is(#sidebar, #top-bar) .has-info + .info-text:visible")
    assert helps.count() == len(SHOWN) - 1  # that of the switch stands below it
    assert set(helps.evaluate_all("all => all.map((e) => e.tabIndex)")) == {0}
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
    page.wait_for_selector("#set-telemetry", state="visible")
    assert len(page.evaluate(CONTROLS)) > 20 and page.evaluate(CUT) == []


def test_nothing_lies_over_another_with_the_longest_names_and_the_api_has_an_address(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask("A question whose name is far longer than what the head of a chat has room for").streaming()
    dashboard.stop()
    assert dashboard.text("[data-api]") == f"{dashboard.url.removeprefix('http://')}/v1"
    page.click("[data-copy-api]")
    dashboard.wait_text("[data-copy-api]", "opied")
    try:
        page.evaluate(
            """document.querySelector('.in-use span').textContent = 'In use: Some-Model-235B-A22B-Instruct-2507'"""
        )
        page.evaluate("""import('/ui/exactness.js').then((m) => m.tell({ weights: 'int4-g64', arithmetic: 'fast' }))""")
        for width in (1366, 1920):
            page.set_viewport_size({"width": width, "height": SIZES[width]})
            assert page.evaluate(OVERLAPS) == [] and page.evaluate(FITS), width
    finally:
        page.set_viewport_size({"width": 1366, "height": SIZES[1366]})
        page.evaluate("""import('/ui/exactness.js').then((m) => m.tell({ weights: '', arithmetic: 'reference' }))""")


def test_the_deck_scrolls_beside_the_chat(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.panel("Co-activation")
    page.locator("canvas[data-c=pairs]").scroll_into_view_if_needed()
    assert page.evaluate(ON_SCREEN), "co-activation is looked at while the composer stays"
    page.evaluate("document.querySelector('#deck-column').scrollTop = 0")


def test_no_preset_is_too_long_for_its_menu(dashboard: Dashboard) -> None:
    """As it is called in the menu, chosen and changed since, on every screen on which the sidebar stands."""
    names = [name for one in PRESETS for name in (one.title, was(one))] + [LISTS]
    room, widths = dashboard.page.evaluate(
        """(names) => { const input = document.querySelector('#set-preset input'), style = getComputedStyle(input);
        const pen = document.createElement('canvas').getContext('2d');
        pen.font = style.font || `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
        const pad = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
        return [input.clientWidth - pad, names.map((name) => pen.measureText(name).width)]; }""",
        names,
    )
    assert [(name, wide, room) for name, wide in zip(names, widths, strict=True) if wide > room] == []


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


@pytest.mark.long(0.1)  # test_jobs.py has a page of this width, the test below every tab
def test_it_fits_and_is_not_blank(phone: Dashboard, tmp_path: Path) -> None:
    fits(phone, tmp_path, 390, "dark")
    assert phone.page.evaluate("document.querySelector('#set-preset').getBoundingClientRect().right <= 0")


@pytest.mark.long(0.1)  # on a desktop below; here every target's size
def test_nothing_of_the_chat_is_cut_off_or_too_small_on_a_phone(phone: Dashboard) -> None:
    whole(phone)
    assert phone.page.evaluate(OVERLAPS) == []


@pytest.mark.long(0.1)
def test_every_target_is_large_enough(phone: Dashboard) -> None:
    page = phone.page
    for tab in ("Chat + Live", "Library", "Calibrate", "Analysis", "Batch", "Sessions", "System"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate(SMALL) == [], tab
        assert page.evaluate(FITS), tab
    page.locator(".sidebar .toggle-button").click()
    phone.advanced()
    page.wait_for_selector("#set-telemetry", state="visible")
    assert page.evaluate(SMALL) == []
    page.locator("#mode").get_by_text("Simple", exact=True).click()
    page.locator(".sidebar .toggle-button").click()


@pytest.mark.long(0.1)
@pytest.mark.parametrize("width", [1366, 1920])
def test_nothing_of_the_chat_is_cut_off_or_too_small(dashboard: Dashboard, width: int) -> None:
    dashboard.page.set_viewport_size({"width": width, "height": SIZES[width]})
    try:
        whole(dashboard, wide=width == 1920)
    finally:
        dashboard.page.set_viewport_size({"width": 1366, "height": SIZES[1366]})


def whole(dashboard: Dashboard, wide: bool = False) -> None:
    """With much that is wide; the list of chats is beside them without being asked for where there is room (`wide`)."""
    page = dashboard.page
    dashboard.ask(
        say(f"| {'wide ' * 30} | b |\n|---|---|\n| 1 | 2 |\n\n```\n{'x' * 300}\n```\n\n$${'a+' * 200}b$$")
    ).answered()
    page.keyboard.press("Alt+r")
    dashboard.wait_text("#chat", "2 / 2")
    dashboard.answered()
    assert page.evaluate(FITS)
    assert page.evaluate(CUT_OFF) == []
    sign = "getComputedStyle(document.querySelector('#chat [data-act=copy]'), '::before').borderTopStyle"
    assert page.evaluate(sign) == "solid", "the copy button's sign is drawn"
    if wide:
        page.wait_for_selector("#chat-list li [aria-current]")
    else:
        page.wait_for_selector("#chat-list", state="hidden")
        page.click("button[data-chats]")
        page.wait_for_selector("#chat-list li [aria-current]")
    assert page.evaluate(SMALL_IN_CHAT) == [] and page.evaluate(FITS)
    if not wide:
        page.click("button[data-chats]")
        page.wait_for_selector("#chat-list", state="hidden")
