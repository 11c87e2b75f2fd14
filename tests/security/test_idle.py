"""A server that nobody uses hardly ever wakes up: counted on a clock of its own that jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from pathlib import Path
from typing import Any

from app.serve import build
from tests.app.conftest import open_host

IDLE_S = 60.0


class Jumping(selectors.DefaultSelector):
    """Counts how often its loop looks for work; where there is none, the clock is at once where the next timer is."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.looks = 0.0, 0

    def select(self, timeout: float | None = None) -> Any:
        self.looks += 1
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None and timeout > 0:
            self.now_s += timeout
        return found


def test_an_idle_server_wakes_up_less_than_once_a_second(tmp_path: Path) -> None:
    host, clock = open_host(tmp_path), Jumping()
    app = build(host)
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]

    async def idle() -> int:
        async with app.router.lifespan_context(app):
            await asyncio.sleep(1.0)  # what begins with the server
            before = clock.looks
            await asyncio.sleep(IDLE_S)
            return clock.looks - before

    try:
        assert 0 < loop.run_until_complete(idle()) < IDLE_S
    finally:
        loop.close()
        host.close()
