"""A complete chat: the list beside it, branches, system prompt, reasoning, copies, exports, keyboard, draft."""

import json
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard
from tests.browser.lengths import say


def users(dashboard: Dashboard) -> list[str]:
    return [str(text) for text in dashboard.page.locator("#chat [data-testid=user]").all_inner_texts()]


def test_branches_go_back_and_forth_and_the_keyboard_does_it_all(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask("First wording, in 3 words").answered()
    page.keyboard.press("Alt+r")
    dashboard.wait_text("#chat", "2 / 2")
    dashboard.answered()
    page.keyboard.press("Alt+e")
    page.locator("#chat textarea").fill("Second wording, in 4 words")
    page.keyboard.press("Enter")
    dashboard.wait_text("#chat", "Second wording")
    dashboard.answered()
    assert users(dashboard) == ["Second wording, in 4 words"] and "4 tokens" in dashboard.answers()[-1]
    page.get_by_role("button", name="Earlier branch").click()
    dashboard.wait_text("#chat", "First wording")
    assert "3 tokens" in dashboard.answers()[-1], "its statistics stay with it"
    assert page.evaluate("document.activeElement.dataset.act") == "later", "the focus stays at the arrows"
    chat = page.evaluate("location.search")
    page.keyboard.press("Alt+n")
    page.wait_for_function("!location.search && !document.querySelector('#chat [data-testid=user]')")
    page.keyboard.press("Alt+k")
    page.locator("#chat-list li .open").first.click()
    dashboard.wait_text("#chat", "First wording")  # the branch that was chosen, as the server has it
    page.wait_for_function("(was) => location.search === was", arg=chat)
    page.wait_for_selector("#chat-list", state="hidden")
    page.keyboard.press("Alt+,")  # of the answer
    dashboard.wait_text("#chat .bot-row", "1 / 2")
    dashboard.ask("And on this branch, in 3 words").answered()
    assert len(dashboard.answers()) == 2
    page.locator("#chat .user-row").first.get_by_role("button", name="Later branch").click()
    dashboard.wait_text("#chat", "Second wording")
    assert len(dashboard.answers()) == 1


def test_an_answer_is_edited_in_place(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask(say("What the model wrote")).answered()
    page.click("#chat .bot-row [data-act=edit]")
    page.fill("#chat .editing textarea", "What I make of it")
    page.click("#chat .editing [data-act=submit]")
    dashboard.wait_text("#chat .bot-row", "What I make of it")
    assert "edited by you" in dashboard.answers()[0] and "2 / 2" in dashboard.text("#chat .bot-row")
    page.click("#chat .bot-row [data-act=earlier]")
    dashboard.wait_text("#chat .bot-row", "What the model wrote")


def test_escape_stops_and_question_mark_lists_the_shortcuts(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask("Go on and on").streaming()
    page.locator("#message textarea").press("?")
    assert dashboard.value("#message textarea") == "?" and not page.is_visible("#shortcuts"), "it is being written"
    page.click("[data-keys]")
    page.wait_for_selector("#shortcuts", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#shortcuts", state="hidden")
    assert page.evaluate("document.body.dataset.answering") == "1", "Escape closed the list alone"
    page.keyboard.press("Escape")
    dashboard.answered()
    assert "stopped by you" in dashboard.answers()[-1]
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.wait_for_selector("#shortcuts", state="visible")
    assert "Alt+N" in dashboard.text("#shortcuts")
    page.click("#shortcuts [data-close]")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.closest('#message') !== null")


@pytest.mark.long(0.2)  # tests/app/test_store.py has all of it but the page
def test_a_chat_is_pinned_and_deleted_in_the_list(dashboard: Dashboard) -> None:
    page, first = dashboard.page, "#chat-list li:first-child"
    for text in ("older, in 3 words", "newer, in 3 words"):
        dashboard.emptied().ask(text).answered()
    page.click("button[data-chats]")
    dashboard.wait_text(first, "newer")
    page.hover("#chat-list li:has-text('older')")
    page.click("#chat-list li:has-text('older') .pin")
    dashboard.wait_text(f"{first}.pinned", "older")
    page.click(f"{first} .pin")
    dashboard.wait_text(first, "newer")
    page.hover(first)
    page.click(f"{first} .delete")
    page.click(f"{first} .sure")
    dashboard.wait_text(first, "older")
    page.wait_for_function("!location.search && !document.querySelector('#chat [data-testid=user]')")
    page.keyboard.press("Escape")


def test_the_list_opens_finds_and_renames(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask(say("The heron stands in shallow water.")).answered()
    first = page.evaluate("location.search")
    page.keyboard.press("Alt+n")
    page.wait_for_function("!location.search")
    dashboard.ask("Another one, in 3 words").answered()
    page.keyboard.press("Alt+k")
    page.wait_for_selector("#chat-list li [aria-current]")
    assert "Another one" in dashboard.text("#chat-list li [aria-current]")
    page.keyboard.type("shallow HERON")
    page.wait_for_function("document.querySelectorAll('#chat-list li').length === 1")
    assert "heron stands" in dashboard.text("#chat-list li")
    page.get_by_role("button", name="Rename").first.click()
    saving: list[Any] = []  # the name is on its way while the chat is opened
    renames = '"do":"rename"'
    page.route(
        "**/gradio_api/run/*",
        lambda route: saving.append(route) if renames in route.request.post_data else route.continue_(),
    )
    with page.expect_request(lambda request: renames in (request.post_data or "")):
        page.get_by_label("Name of the chat").fill("Birds")
        page.keyboard.press("Enter")
    dashboard.wait_text("#chat-list", "Birds")
    page.evaluate("document.querySelector('#chat-list li').dataset.before = '1'")
    page.locator("#chat-list input[type=search]").fill("shallow")
    page.wait_for_selector("#chat-list li:not([data-before])")  # drawn anew, as the server still has it
    assert "Birds" in dashboard.text("#chat-list li")
    page.locator("#chat-list input[type=search]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    saving.pop().continue_()
    page.unroute("**/gradio_api/run/*")
    dashboard.wait_text("#chat", "The heron stands")
    dashboard.wait_text("#chat-title", "Birds")
    page.wait_for_function("(was) => location.search === was", arg=first)
    page.wait_for_selector("#chat-list", state="hidden")  # it stood over the chat
    page.keyboard.press("Alt+k")
    page.locator("#chat-list input[type=search]").fill("no such words anywhere")
    dashboard.wait_text("#chat-list", "Nothing found")
    page.keyboard.press("Escape")
    page.wait_for_function("document.querySelectorAll('#chat-list li').length > 1")
    page.keyboard.press("Escape")
    page.wait_for_selector("#chat-list", state="hidden")


def test_reasoning_is_folded_and_a_copy_is_the_answer_alone(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.evaluate(
        """() => { window.copied = []; Object.defineProperty(navigator, 'clipboard', { configurable: true,
            value: { writeText: async (text) => { window.copied.push(text); } } }); }"""
    )
    text = "<think>\nWhy *not*?\n</think>\n\nIt is **so**:\n\n```python\nx = 1\n```"
    dashboard.ask(say(text)).answered()
    answer = page.locator("#chat [data-testid=bot]").last
    assert not answer.get_by_text("not").is_visible()
    assert "so" in answer.locator("strong").inner_text() and "<think>" not in answer.inner_text()
    answer.locator("summary").click()
    answer.locator("em", has_text="not").wait_for()
    page.keyboard.press("Alt+c")
    page.wait_for_function("window.copied.length === 1")
    answer.get_by_role("button", name="Copy the code").click()
    page.wait_for_function("window.copied.length === 2")
    assert page.evaluate("window.copied") == ["It is **so**:\n\n```python\nx = 1\n```", "x = 1"]


def test_the_system_prompt_of_a_chat_and_of_new_ones_and_the_exports(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.keyboard.press("Alt+s")
    page.locator("#system textarea").fill("Answer in Latin.")
    page.click("#system-default")
    dashboard.wait_text("#system-said", "New chats begin with this")
    page.locator("#system textarea").fill("Answer in Greek.")
    dashboard.ask("Who are you, in 3 words").answered()
    for link, wanted in (("#export-markdown", "Answer in Greek."), ("#export-json", '"system": "Answer in Greek."')):
        page.click("#export-menu")
        with page.expect_download() as download:
            page.click(link)
        assert wanted in Path(download.value.path()).read_text(encoding="utf-8")
    assert json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["messages"][1]["statistics"]
    page.click("#export-menu")
    with page.expect_download() as download:
        page.click("#csv")
    with zipfile.ZipFile(download.value.path()) as archive:
        assert archive.read("tokens.csv").count(b"\n") > 3
    page.click("#new-chat")
    page.wait_for_function("document.querySelector('#system textarea').value === 'Answer in Latin.'")
    page.locator("#system textarea").fill("")
    page.click("#system-default")
    dashboard.wait_text("#system-said", "New chats begin without")
    page.keyboard.press("Escape")
    page.wait_for_selector("#system-panel", state="hidden")


@pytest.mark.long(0.1)  # test_chat.py has a draft outlive a reload
def test_what_is_typed_as_soon_as_a_new_chat_shows_stays(dashboard: Dashboard) -> None:
    page, box = dashboard.page, "#message textarea"
    dashboard.ask("Say little, in 3 words").answered()
    page.route("**/live/state*", lambda route: None)  # the server is busy: the page learns nothing for now
    page.click("#new-chat")
    page.wait_for_function("!location.search && document.body.dataset.empty === '1'")
    page.fill(box, "typed at once")
    page.unroute("**/live/state*")
    page.reload()
    dashboard.settled()
    page.wait_for_function("document.querySelector('#message textarea').value === 'typed at once'")
    page.fill(box, "")


@pytest.mark.long(0.1)  # test_chat.py has a draft outlive a reload
def test_a_draft_outlives_a_reload_and_a_look_at_another_chat(dashboard: Dashboard) -> None:
    page, box = dashboard.page, "#message textarea"
    dashboard.ask("Say little, in 3 words").answered()
    page.fill(box, "not sent yet")
    page.reload()
    dashboard.settled()
    page.wait_for_function("document.querySelector('#message textarea').value === 'not sent yet'")
    page.click("#new-chat")
    page.wait_for_function("document.querySelector('#message textarea').value === ''")
    page.fill(box, "of the new one")
    page.keyboard.press("Alt+k")
    page.locator("#chat-list li", has_text="Say little").first.locator(".open").click()
    page.wait_for_function("document.querySelector('#message textarea').value === 'not sent yet'")
    page.press(box, "Enter")
    dashboard.streaming()
    assert dashboard.value(box) == ""
    dashboard.stop()
    page.click("#new-chat")
    page.wait_for_function("document.querySelector('#message textarea').value === 'of the new one'")


def test_markdown_is_drawn_while_it_streams(dashboard: Dashboard) -> None:
    """The tail of the answer, as pulse.js is told of it."""
    drawn = dashboard.page.evaluate(
        """async () => { const { AnswerView } = await import("/ui/chat/answer.js");
        const box = document.createElement("div"), view = new AnswerView(box), seen = [];
        const text = "<think>a b</think>\\n\\n# Head\\n\\n- one **two**\\n\\n```py\\nx";
        for (const end of [3, 9, 20, 30, text.length]) { view.show(text.slice(0, end), false, false);
            seen.push([box.querySelector("details").hidden, box.querySelector("summary").textContent,
                box.lastChild.textContent]); }
        return [seen, [...box.querySelectorAll("h1, li, strong, pre")].map((e) => e.tagName)]; }"""
    )
    seen, tags = drawn
    assert seen[0] == [True, "", ""], "it may become a tag"
    assert seen[1][:2] == [False, "Reasoning… (1 word)"] and seen[2][:2] == [False, "Reasoning (2 words)"]
    assert tags == ["H1", "LI", "STRONG", "PRE"]


@pytest.mark.long(0.2)
def test_a_model_without_a_chat_template_says_so(open_page: Open, tmp_path: Path) -> None:
    with Server(tmp_path, MOESTRO_TEST_BASE="1").running() as server:
        dashboard = open_page(url=server.url)
        dashboard.wait_text("#chat-plain", "no chat template")
        dashboard.wait_text("#chat-empty", "Begin a text")
        dashboard.ask("Once upon a time, in 3 words").answered()
        with urllib.request.urlopen(f"{server.url}/export/1.json", timeout=30) as reply:
            assert json.loads(reply.read())["messages"][0]["text"].startswith("Once")
