"""A crash of the server in the middle of an answer: the open page says so, finds it again, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from tests.browser.conftest import Open, Server
from tests.browser.test_chat import begins


def test_the_page_outlives_a_crash(open_page: Open, tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        dashboard = open_page(url=server.url)
        seen = dashboard.ask("Survive a crash").streaming(60)
        server.kill()
        dashboard.page.wait_for_function("document.querySelector('.deck').dataset.state === 'offline'")
        server.start()
        dashboard.wait_text("#chat", "interrupted")
        assert begins(dashboard.answers()[-1], seen)
        dashboard.page.wait_for_function("document.querySelector('.deck').dataset.state === 'live'")
        dashboard.ask("And now?").streaming()
        dashboard.stop()
        server.end()
    finally:
        server.kill()
