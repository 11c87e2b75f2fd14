"""The list of chats next to the chat: the route that a page requests when it has changed, or when the user searches."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query

from app.services.host import Host

MOST = 200  # lines of the list; older chats are found by searching, and in the tab Sessions
MOST_CHARS = 200  # of a query


def router(host: Host) -> APIRouter:
    """The route /live/chats."""
    routes = APIRouter()

    @routes.get("/live/chats")
    def chats(find: str = Query("", max_length=MOST_CHARS)) -> dict[str, Any]:
        """The chats most recently changed, or those that have all words of `find`, with an excerpt of the message that
        has them. `more` = there are others.
        """
        every = host.store.chats.all()
        if not find.strip():
            lines = [{"id": one.id, "title": one.title, "excerpt": ""} for one in every[:MOST]]
            return {"chats": lines, "more": len(every) > MOST}
        titles = {one.id: one.title for one in every}
        found = [one for one in host.store.search_chats(find, MOST + 1) if one.chat in titles]
        lines = [{"id": one.chat, "title": titles[one.chat], "excerpt": one.excerpt} for one in found[:MOST]]
        return {"chats": lines, "more": len(found) > MOST}

    return routes
