"""What is turned while a prompt is read acts, also when Stop follows, with the real engine over a link that is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server

SLOWEST = """() => { const range = document.querySelector('#set-link_gbps input[type=range]');
    range.value = range.min; range.dispatchEvent(new Event('input', {bubbles: true})); }"""


@pytest.mark.long(0.5)
def test_a_knob_turned_while_a_prompt_is_read_is_not_lost(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        dashboard.advanced()
        dashboard.choose("set-link", "emulated")
        page.wait_for_selector("#set-link_gbps", state="visible")
        page.evaluate(SLOWEST)
        dashboard.ask("Which of them is used? " * 20)
        dashboard.wait_text(".tail", "Reading the prompt")
        bypass = page.locator("#set-bypass input")
        before = bypass.is_checked()
        dashboard.reach("set-bypass")
        bypass.click()
        page.wait_for_function("document.querySelector('.tail').innerText.includes('Reading the prompt')")
        dashboard.stop()
        assert bypass.is_checked() != before
        dashboard.choose("set-link", "auto")
        dashboard.ask("Hello").streaming()
        assert any(mark.startswith("bypass") for mark in dashboard.marks()), dashboard.marks()
        assert bypass.is_checked() != before
    finally:
        server.kill()
