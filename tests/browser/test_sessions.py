"""Sessions: the chats of the past, and their measurements as CSV."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from core.profile.trace import open_trace
from tests.browser.dashboard import Dashboard


def _begin(dashboard: Dashboard, text: str) -> None:
    dashboard.ask(text).streaming()
    dashboard.stop()


@pytest.mark.long(0.1)  # tests/app/test_export.py has the tables, test_chats.py downloads from the same menu
def test_measurements_download_as_csv(dashboard: Dashboard) -> None:
    _begin(dashboard, "Measure me")
    dashboard.page.click("#export-menu")
    with dashboard.page.expect_download() as download:
        dashboard.page.click("#csv")
    with zipfile.ZipFile(download.value.path()) as archive:
        tables = {name: archive.read(name).decode().count("\n") for name in archive.namelist() if name.endswith(".csv")}
    assert tables
    assert max(tables.values()) > 5


def test_rename_open_and_delete(dashboard: Dashboard) -> None:
    _begin(dashboard, "A chat to rename")
    page = dashboard.page
    page.click("#new-chat")
    page.get_by_role("tab", name="Sessions").click()
    page.locator("#chats label", has_text="A chat to rename").click()
    page.wait_for_selector("#chat-card")
    page.locator("#chat-name").get_by_role("textbox").fill("Renamed chat")
    page.click("#rename-chat")
    dashboard.wait_text("#chats", "Renamed chat")
    page.click("#open-chat")
    dashboard.wait_text("#chat", "A chat to rename")
    dashboard.wait_text("#chat-title", "Renamed chat")
    page.get_by_role("tab", name="Sessions").click()
    page.click("#delete-chat")
    page.wait_for_selector("#confirm")
    assert "Renamed chat" in dashboard.text("#chats")
    page.click("#delete-no")
    page.wait_for_selector("#confirm", state="hidden")
    page.click("#delete-chat")
    page.click("#delete-yes")
    page.wait_for_function("!document.querySelector('#chats')?.innerText.includes('Renamed chat')")
    page.get_by_role("tab", name="Chat + Live").click()
    dashboard.wait_text("#chat-alert", "no longer exists")


@pytest.mark.long(0.1)  # test_chats.py searches in the list; tests/app/test_branches.py in the store
def test_a_chat_is_found_by_what_was_said_in_it(dashboard: Dashboard) -> None:
    page = dashboard.page
    for text in ("The walrus and the carpenter", "Cabbages, 100% of kings"):
        _begin(dashboard, text)
        page.click("#new-chat")
        page.wait_for_function("!location.search && document.body.dataset.empty === '1'")
    page.get_by_role("tab", name="Sessions").click()
    dashboard.wait_text("#chats", "walrus")
    search, count = (
        page.locator("#chat-search").get_by_role("textbox"),
        "document.querySelectorAll('#chats label').length",
    )
    search.fill("WALRUS carp")
    page.wait_for_function(f"{count} === 1")
    assert "walrus" in dashboard.text("#chats")
    page.locator("#chats label").click()
    page.wait_for_selector("#chat-card")
    search.fill("100% king")
    page.wait_for_selector("#chat-card", state="hidden")
    dashboard.wait_text("#chats", "Cabbages")
    search.fill("walrus 100%")
    dashboard.wait_text("#no-chats", "No chat has these words")
    page.get_by_role("tab", name="Chat + Live").click()
    page.get_by_role("tab", name="Sessions").click()
    page.wait_for_function(f"{count} > 1")
    assert search.input_value() == ""


@pytest.mark.long(0.1)  # tests/app/test_traces.py; the test of measurements downloads
def test_routing_downloads_as_a_trace_and_is_deleted_apart(dashboard: Dashboard, tmp_path: Path) -> None:
    _begin(dashboard, "Trace me")
    page = dashboard.page
    page.get_by_role("tab", name="Sessions").click()
    page.locator("#chats label", has_text="Trace me").click()
    page.wait_for_selector(".session-trace")
    with page.expect_download() as download:
        page.click(".session-trace")
    trace = open_trace(Path(download.value.path()))
    assert (trace.layers, trace.experts, trace.top_k, trace.model) == (4, 16, 2, "demo")
    assert f"{trace.tokens} tokens" in dashboard.text("#chat-about")
    page.click("#delete-recording")
    page.wait_for_selector("#confirm-recording")
    page.click("#recording-no")
    page.wait_for_selector("#confirm-recording", state="hidden")
    assert page.is_visible(".session-trace")
    page.click("#delete-recording")
    page.click("#recording-yes")
    dashboard.wait_text("#chat-about", "No routing was recorded")
    page.wait_for_selector("#delete-recording", state="hidden")
    page.click("#open-chat")
    dashboard.wait_text("#chat", "Trace me")
