"""A crash of the server in the middle of an answer: the open page says so, finds it again, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.test_chat import begins

LAST = "[...document.querySelectorAll('#chat [data-testid=bot]')].at(-1)"


@pytest.mark.long(0.6)  # test_store_crash.py tries without a browser that nothing is lost
def test_the_page_outlives_a_crash(open_page: Open, tmp_path: Path) -> None:
    """While somebody watches; and once more, while somebody presses a button."""
    server = Server(tmp_path).start()
    try:
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
        server.end()
    finally:
        server.kill()
