"""Chat: streaming, statistics, stop, regenerate, edit, reload, a second tab."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Open
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


@pytest.mark.long(0.1)  # the test of a reload, below, stops, too
def test_stop_keeps_what_was_written(dashboard: Dashboard) -> None:
    dashboard.ask("Stop in the middle").streaming(60)
    seen = dashboard.tail()
    dashboard.stop()
    answer = dashboard.answers()[-1]
    assert begins(answer, seen)
    assert "stopped by you" in answer


@pytest.mark.long(0.1)  # test_chats.py does it by the keyboard
def test_regenerate_puts_another_in_place_of_the_last_answer(dashboard: Dashboard) -> None:
    dashboard.ask("Once more").streaming()
    dashboard.stop()
    before = dashboard.page.evaluate("location.search")
    dashboard.page.get_by_role("button", name="Regenerate").click()
    dashboard.streaming()
    dashboard.stop()
    assert len(dashboard.answers()) == 1
    assert dashboard.page.evaluate("location.search") == before


@pytest.mark.long(0.1)  # test_chats.py does it by the keyboard
def test_an_edited_message_is_answered_anew(dashboard: Dashboard) -> None:
    dashboard.ask("First wording").streaming()
    dashboard.stop()
    dashboard.page.get_by_role("button", name="Edit").first.click()
    dashboard.page.locator("#chat textarea").fill("Second wording")
    dashboard.page.locator("#chat").get_by_role("button", name="Send").click()
    dashboard.streaming()
    dashboard.stop()
    assert dashboard.page.locator("#chat [data-testid=user]").all_inner_texts() == ["Second wording"]
    assert len(dashboard.answers()) == 1


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


@pytest.mark.long(0.2)  # tests/app/test_waiting.py has the queue, the test below two pages
def test_a_second_tab_waits_its_turn_and_can_stop_waiting(dashboard: Dashboard, open_page: Open) -> None:
    other = open_page()
    dashboard.ask("I am first").streaming()
    other.ask("I am second")
    other.wait_text("[data-t=line]", "yours is next")
    third = open_page()
    third.ask("I am third")
    third.wait_text("[data-t=line]", "1 more waits before yours")
    third.stop()
    dashboard.stop()
    other.streaming()
    other.stop()
    assert "stopped by you" in other.answers()[-1]


@pytest.mark.long(0.1)  # a reload, above, finds its answer in the same way
def test_two_tabs_on_one_chat_show_the_same(dashboard: Dashboard, open_page: Open) -> None:
    dashboard.ask("Seen by both").streaming()
    other = open_page(path="/" + dashboard.page.evaluate("location.search"))
    other.streaming()
    dashboard.stop()
    other.answered()
    other.wait_text("#chat", "stopped by you")
    assert other.answers()[-1] == dashboard.answers()[-1]


def test_an_empty_message_is_refused_in_words(dashboard: Dashboard) -> None:
    dashboard.page.click("#send")
    dashboard.wait_text("#chat-alert", "The message is empty")


@pytest.mark.long(0.1)  # test_chats.py begins a new chat and finds the old one in the list, test_sessions.py in the tab
def test_a_new_chat_is_empty_and_the_old_one_is_kept(dashboard: Dashboard) -> None:
    dashboard.ask("Keep me").streaming()
    dashboard.stop()
    dashboard.page.click("#new-chat")
    dashboard.page.wait_for_function("!location.search && !document.querySelector('#chat [data-testid=user]')")
    dashboard.page.get_by_role("tab", name="Sessions").click()
    dashboard.wait_text("#chats", "Keep me")
