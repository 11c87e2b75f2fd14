"""A crash of the server in the middle of an answer: the open page says so, finds it again, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.test_chat import begins


@pytest.mark.parametrize("event", [False, True], ids=["watching", "pressing a button meanwhile"])
def test_the_page_outlives_a_crash(open_page: Open, tmp_path: Path, event: bool) -> None:
    server = Server(tmp_path).start()
    try:
        dashboard = open_page(url=server.url)
        seen = dashboard.ask("Survive a crash").streaming(60)
        server.kill()
        dashboard.page.wait_for_function("document.querySelector('.deck').dataset.state === 'offline'")
        if event:  # which the server never gets: Gradio then asks for `app_id` until it is back, and reloads the page
            with dashboard.page.expect_request("**/app_id"):
                dashboard.page.click("#stop")
        server.start()
        dashboard.wait_text("#chat", "interrupted")
        assert begins(dashboard.answers()[-1], seen)
        dashboard.page.wait_for_function("document.querySelector('.deck').dataset.state === 'live'")
        dashboard.ask("And now?").streaming()
        dashboard.stop()
        server.end()
    finally:
        server.kill()
