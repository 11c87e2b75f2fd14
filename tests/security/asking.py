"""One request put to the gate, and what came back."""

import asyncio

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.security.access import Access
from app.server.security.gate import Gate

TOKEN = "a-token_of.this~test"
LAN = "http://192.168.1.5:7860"


async def inside(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("inside")(scope, receive, send)


def ask(
    app: ASGIApp,
    *headers: tuple[str, str],
    method: str = "GET",
    path: str = "/live/frame",
    query: str = "",
    kind: str = "http",
) -> tuple[int, dict[str, str], str]:
    """(status, headers, body); of a websocket its closing code."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    if kind == "websocket":
        del scope["method"]
    asyncio.run(app(scope, receive, send))
    if kind == "websocket":
        return sent[0].get("code", 0), {}, ""
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, b"".join(one.get("body", b"") for one in sent[1:]).decode()


def gate(access: Access | None = None) -> Gate:
    return Gate(inside, access or Access())
