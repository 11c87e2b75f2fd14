"""The bar above the tabs: which model, whether it fits, whether it is exact, and what leads on from there."""

from pathlib import Path

from tests.browser.conftest import Open
from tests.browser.dashboard import Dashboard

BADGES = "[...document.querySelectorAll('[data-exactness]')].filter((e) => e.checkVisibility()).length"
# What a page says from its first moment on: of the model, and in the composer.
SAID = """window.said = new Set(); new MutationObserver(() => {
    for (const s of ['#model-status', '#chat-empty']) {
        const e = document.querySelector(s);
        if (e?.checkVisibility() && e.innerText.trim()) window.said.add(e.innerText); }
    const field = document.querySelector('#message textarea');
    if (field?.placeholder) window.said.add(field.placeholder);
    }).observe(document, { childList: true, subtree: true, attributes: true, characterData: true });"""


def enter(dashboard: Dashboard, model: str) -> None:
    box = dashboard.page.locator("#model input")
    box.fill(model)
    box.press("Enter")


def test_the_chip_has_the_verdict_of_the_card_and_leads_to_it(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.wait_text("#fit-chip", " free: ")
    assert page.evaluate("document.querySelector('#fit .verdict').innerText") == "Fits"
    assert page.evaluate(BADGES) == 1, "EXACT stands once"
    page.click(".sidebar.open .toggle-button")
    page.wait_for_selector(".sidebar:not(.open)")
    page.click("[data-show-fit]")
    page.wait_for_selector(".sidebar.open")
    page.wait_for_function("document.activeElement.matches('#fit .fit')")


def test_what_is_imported_first_leads_to_its_import(dashboard: Dashboard, tmp_path: Path) -> None:
    page, source = dashboard.page, tmp_path / "Mine-30B.gguf"
    source.touch()
    try:
        enter(dashboard, str(source))
        dashboard.wait_text("#fit-chip", "Import")
        page.wait_for_selector(".in-use span:visible")
        assert "In use: " in dashboard.text(".in-use"), "another one is chosen than loaded"
        page.click("#fit-chip button")
        page.wait_for_function(
            "(path) => document.querySelector('#import-source :is(input, textarea)')?.value === path", arg=str(source)
        )
        page.wait_for_function("document.activeElement.id === 'import-start'")
    finally:
        enter(dashboard, "demo")
    dashboard.wait_text("#fit-chip", "free")
    page.wait_for_selector(".in-use span", state="hidden")


def test_a_page_says_nothing_of_before_the_load(open_page: Open) -> None:
    dashboard = open_page()
    dashboard.page.add_init_script(SAID)
    dashboard.goto().wait_text("#model-status", "Demo model")
    said = "\n".join(dashboard.page.evaluate("[...window.said]"))
    assert "Demo model" in said and "Ask something" in said
    assert "Load a model" not in said and "No model" not in said
