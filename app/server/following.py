"""Follows work in progress on the event loop: waiting requests hold no threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive

from app.services.progress import Live


@contextmanager
def news_of(live: Live) -> Iterator[asyncio.Event]:
    """An event of the running loop that every update of `live` sets. Clear it, read the fields, then wait for it."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not news.is_set():  # if set, its reader has yet to read the fields
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(news.set)

    live.watch(wake)
    try:
        yield news
    finally:
        live.unwatch(wake)


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
