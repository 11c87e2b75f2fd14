"""An answer that was cut is continued from its button, also by keyboard, and stands in its place."""

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard
from tests.fakes import FakeEngine

CONTINUE = '#chat [data-act="continue"]'


def bot(dashboard: Dashboard) -> str:
    return str(dashboard.page.locator("#chat .bot-row .answer").last.inner_text())


def test_an_answer_is_stopped_and_continued_to_its_end(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.ask("Go on, in 30 words").streaming(30)
    dashboard.stop()
    seen = bot(dashboard)
    page.click(CONTINUE)
    page.wait_for_function("document.body.dataset.answering === '1'")
    assert dashboard.streaming(len(seen) + 5).startswith(seen), "the tail has the whole answer"
    dashboard.answered()
    assert bot(dashboard).startswith(seen)
    assert "30 tokens more, after" in dashboard.answers()[-1], "the limit is that of each part"
    assert page.locator("#chat .bot-row").count() == 1 and page.locator("#chat .at").count() == 0, "no branch"
    dashboard.ask("And then, in 3 words").answered()
    assert page.locator(CONTINUE).count() == 1, "the last answer alone has the button"
    page.keyboard.press("Alt+g")
    dashboard.answered()
    dashboard.wait_text("#chat .bot-row:last-child .line", "more, after 3")


@pytest.mark.long(0.4)  # tests/app/test_continued.py has what the store keeps of a crash
def test_what_a_crash_cut_goes_on(open_page: Open, tmp_path: Path) -> None:
    with Server(tmp_path).running() as server:
        dashboard = open_page(url=server.url)
        page = dashboard.page
        seen = dashboard.ask("Survive this").streaming(60).split()[:-1]  # its last word may have been cut
        server.kill()
        page.wait_for_function("document.querySelector('.deck').dataset.state === 'offline'")
        server.start()
        dashboard.wait_text("#chat .bot-row .line", "interrupted")
        page.click(CONTINUE)
        page.wait_for_function("document.body.dataset.answering === '1'")
        dashboard.streaming(len(" ".join(seen)) + 20)
        dashboard.stop()
        words = bot(dashboard).split()
        assert words[: len(seen)] == seen
        assert all(words[at] == words[at % len(FakeEngine.words)] for at in range(len(words))), "none lost, none twice"
