"""A server that nobody uses hardly ever wakes up: counted on a clock of its own that jumps to the next timer.

What is left is Gradio's look for closed pages, once a second; its queue would look a thousand times a second.
"""

from __future__ import annotations

import asyncio
import selectors
from pathlib import Path
from typing import Any

from app.ui.serve import build
from tests.app.conftest import open_host

IDLE_S = 60.0


class Jumping(selectors.DefaultSelector):
    """Where its loop has nothing to do, the clock is at once where the next timer is: counted as waking up."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.woken = 0.0, 0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None and timeout > 0:
            self.now_s, self.woken = self.now_s + timeout, self.woken + 1
        return found


def test_an_idle_server_wakes_up_about_once_a_second(tmp_path: Path) -> None:
    host, clock = open_host(tmp_path), Jumping()
    app = build(host)

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.SelectorEventLoop(clock)
        made.time = lambda: clock.now_s  # type: ignore[method-assign]
        return made

    async def idle() -> int:
        async with app.router.lifespan_context(app):
            await asyncio.sleep(1.0)  # what begins with the server
            before = clock.woken
            await asyncio.sleep(IDLE_S)
            return clock.woken - before

    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            assert 0 < runner.run(idle()) < 1.5 * IDLE_S
    finally:
        host.close()
