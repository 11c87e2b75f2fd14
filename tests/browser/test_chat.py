"""Chat: streaming, statistics, stop, regenerate, edit, reload, a second tab; the chats of the past; a crash."""

from pathlib import Path

import pytest

from core.profile.trace import open_trace
from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard


def begins(answer: str, seen: str) -> bool:
    """Does the answer begin with what was seen of it? Its last word may have been cut, and spaces may differ."""
    words = seen.split()[:-1]
    return len(words) > 0 and answer.split()[: len(words)] == words


def test_an_answer_streams_and_ends_with_its_statistics(dashboard: Dashboard) -> None:
    frames = dashboard.deck("frames")
    dashboard.ask("What does the cache keep?").streaming()
    assert "tokens" in dashboard.text("[data-t=line]")
    dashboard.wait_deck("frames", frames + 1)
    dashboard.stop()
    dashboard.ask("And in 20 words?").answered()
    answer = dashboard.answers()[-1]
    assert "20 tokens" in answer and "stopped" not in answer
    for said in ("tok/s", "TTFT", "hit rate", "stall", "EXACT", "tokens"):
        assert said in answer
    dashboard.wait_text("#context", "tokens")
    assert int(dashboard.page.get_attribute("#context [role=meter]", "aria-valuenow") or 0) > 0


def test_a_reload_in_the_middle_loses_nothing(dashboard: Dashboard) -> None:
    """Neither the answer nor a draft; and what was Advanced still is."""
    page, box = dashboard.page, "#message textarea"
    dashboard.advanced()
    page.wait_for_selector("#set-scope", state="visible")
    dashboard.ask("Do not lose me").streaming(60)
    page.fill(box, "not sent yet")
    before = dashboard.tail()
    page.reload()
    dashboard.settled()
    again = dashboard.streaming(len(before))
    assert again.startswith(before)
    assert page.locator("#chat [data-testid=user]").all_inner_texts() == ["Do not lose me"]
    page.wait_for_selector("#set-scope", state="visible")
    page.wait_for_function("document.querySelector('#message textarea').value === 'not sent yet'")
    dashboard.stop()
    assert begins(dashboard.answers()[-1], before)
    assert "stopped by you" in dashboard.answers()[-1]


def _begin(dashboard: Dashboard, text: str) -> None:
    dashboard.ask(text).streaming()
    dashboard.stop()


@pytest.mark.long(0.1)
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


@pytest.mark.long(0.2)  # tests/app/test_answer_exports.py has the tables
def test_answers_stand_side_by_side_with_what_differs(dashboard: Dashboard, tmp_path: Path) -> None:
    page = dashboard.page
    for policy in ("LFU", "LRU"):
        dashboard.choose("set-eviction", policy)
        _begin(dashboard, f"A run with {policy}")
        page.click("#new-chat")
        page.wait_for_function("!location.search && document.body.dataset.empty === '1'")
    page.get_by_role("tab", name="Sessions").click()
    page.get_by_role("button", name="Runs: every answer").click()
    dashboard.wait_text("#runs-table", "A run with LFU")
    for policy in ("LRU", "LFU"):
        page.locator("#runs-chosen input").click()
        page.get_by_role("option").filter(has_text=f"A run with {policy}").click()
    dashboard.wait_text("#runs-sides", "Cache policy")
    assert "LRU\tLFU" in dashboard.text("#runs-sides")
    with page.expect_download() as download:
        page.click("#runs-csv")
    assert "setting.eviction" in Path(download.value.path()).read_text("utf-8").partition("\n")[0]


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


LAST = "[...document.querySelectorAll('#chat [data-testid=bot]')].at(-1)"


@pytest.mark.long(0.6)  # test_store_crash.py tries without a browser that nothing is lost
def test_the_page_outlives_a_crash(open_page: Open, tmp_path: Path) -> None:
    """While somebody watches; and once more, while somebody presses a button."""
    with Server(tmp_path).running() as server:
        dashboard = open_page(url=server.url)
        page = dashboard.page
        for event in (False, True):
            page.evaluate("window.before = true")
            seen = dashboard.ask(f"Survive a crash {event}").streaming(60)
            server.kill()
            page.wait_for_function("document.querySelector('.deck').dataset.state === 'offline'")
            if event:  # the server never gets it: Gradio then asks for `app_id` until it is back, and reloads the page
                with page.expect_request("**/app_id"):
                    page.click("#stop")
            server.start()
            if event:
                page.wait_for_function("!window.before")
                dashboard.settled()
            page.wait_for_function(f"{LAST}?.innerText.includes('interrupted')")
            assert begins(dashboard.answers()[-1], seen)
            page.wait_for_function("document.querySelector('.deck').dataset.state === 'live'")
            dashboard.ask("And now?").streaming()
            dashboard.stop()


def test_text_files_go_with_a_message_and_stand_folded_in_it(dashboard: Dashboard) -> None:
    page, box = dashboard.page, "#message textarea"
    page.fill(box, "What is this?")
    files = (("notes.md", b"# Notes\r\n```\ncode\n```\n"), ("wide.txt", "gr\u00f6\u00dfer".encode("utf-16")))
    others = (("photo.png", b"\x89PNG\r\n\x1a\n\0\0"), ("long.txt", b"x" * ((1 << 20) + 1)))
    page.set_input_files(
        "#attached", [{"name": name, "mimeType": "", "buffer": data} for name, data in (*files, *others)]
    )
    dashboard.wait_text("#attach-said", "long.txt is larger than 1 MB")
    assert "photo.png is not a text file" in dashboard.text("#attach-said")
    typed = str(page.input_value(box))
    assert typed == (
        "What is this?\n\nFile notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\n"
        "File wide.txt:\n```\ngr\u00f6\u00dfer\n```\n\n"
    )
    dashboard.ask(typed + "Tell me.").streaming()
    dashboard.stop()
    message = page.locator("#chat [data-testid=user]").last
    assert message.locator("summary").all_inner_texts() == ["notes.md, 4 lines", "wide.txt, 1 line"]
    assert not message.locator("pre").first.is_visible()
    message.locator("summary").first.click()
    assert message.locator("pre").first.inner_text() == "# Notes\n```\ncode\n```"
    shown = str(message.inner_text())
    assert shown.startswith("What is this?") and shown.endswith("Tell me.")
    for event, where, carries in (("drop", "#talk", "dataTransfer"), ("paste", box, "clipboardData")):
        page.evaluate(f"""() => {{
            const files = new DataTransfer();
            files.items.add(new File(["more"], "{event}.txt"));
            const event = new Event("{event}", {{ bubbles: true, cancelable: true }});
            event.{carries} = files;
            document.querySelector("{where}").dispatchEvent(event); }}""")
        page.wait_for_function(f"document.querySelector('{box}').value.includes('File {event}.txt')")
    assert dashboard.text("#attach-said") == ""
    page.fill(box, "")


@pytest.mark.long(0.1)  # tests/app/test_host.py refuses it; other alerts are in test_sidebar.py
def test_an_empty_message_is_refused_in_words(dashboard: Dashboard) -> None:
    dashboard.page.click("#send")
    dashboard.wait_text("#chat-alert", "The message is empty")
