"""The server's gate, passed by every request first. Checks Host, Origin and token.

A page of another site can make a browser send requests here, but can neither forge `Host` and `Origin` nor read our
cookie. Opening `/?token=...` sets the token as a cookie that scripts cannot read and other sites' pages do not send,
and redirects to the address without it; a program sends `Authorization: Bearer`, or `X-Api-Key` as Anthropic's clients
do. Pages of the origins that the user allows may use the API, and nothing else. Headers in which a client says under
which address, or for whom, it came do not pass: Gradio would make its page's root of them."""

import logging
from html import escape
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.errors import API, ApiError, of_api, refusal
from app.server.security.access import Access
from app.server.security.hosts import named_host

log = logging.getLogger("moestro.app")
NO_TOKEN = (
    "This Moestro asks for a token. Open the address that it printed when it was started; it ends in "
    "?token=... Programs send the header Authorization: Bearer TOKEN."
)
CLAIMS = (b"forwarded", b"x-")  # headers of a proxy; there is none, so they are not believed
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "*, Authorization",
    "access-control-allow-private-network": "true",
    "access-control-max-age": "600",
}
GO_ON = (
    '<!doctype html><html lang="en"><meta http-equiv="refresh" content="0; url={url}"><title>Moestro</title>'
    '<a href="{url}">Moestro</a></html>'
)
REFUSED = (
    '<!doctype html><html lang="en"><title>Moestro</title><h1>Moestro asks for a token</h1><p>Open the address '
    "that it printed when it was started: it ends in <code>?token=...</code></p><p>If you have done so in this "
    'browser before, <a href="{url}">go on here</a>.</p></html>'
)


class Gate:
    """Responds to refused requests itself; passes all others on to `app`."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access, self.trusted = app, access, access.trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        guest = self.guest(headers, scope)
        answer = self.stranger(headers, scope) or (None if guest else foreign(headers, scope))
        if guest and answer is None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            answer = Response(
                status_code=204, headers=PREFLIGHT
            )  # sent by browsers before the request, without a token
        answer = answer or self.unknown(headers, scope)
        if guest:
            send = allowing(guest, send)
        if answer is None:
            kept = [one for one in scope["headers"] if not one[0].startswith(CLAIMS)]
            await self.app({**scope, "headers": kept}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)

    def stranger(self, headers: Headers, scope: Scope) -> Response | None:
        """400 for a host name that is not the server's: another site's name may resolve to this address (DNS
        rebinding)."""
        named = headers.getlist("host")
        if len(named) == 1 and named_host(named[0]) in self.trusted:
            return None
        text = "Moestro does not answer to the name in this address. If it should, start it with --allow-host NAME."
        return refusal(scope, ApiError(text), plain=True)

    def guest(self, headers: Headers, scope: Scope) -> str:
        """The origin of a page that may use the API and now does; else ""."""
        origins = headers.getlist("origin")
        uses_api = scope["type"] == "http" and scope["path"].startswith(f"{API}/")
        return origins[0] if uses_api and len(origins) == 1 and origins[0].lower() in self.access.origins else ""

    def unknown(self, headers: Headers, scope: Scope) -> Response | None:
        """401 without the token; a token in the address sets the cookie and redirects."""
        if self.access.token is None:
            return None
        cookie = f"moestro-token-{headers['host'].rpartition(':')[2]}"
        first = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/"
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True) if first else []
        brought = [value for name, value in query if name == "token"]
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        url = "/" + (f"?{rest}" if rest else "")
        if brought and self.access.known(brought[-1]):
            # A redirect reached from another site's link would come without the cookie; a refresh by the page is
            # same-site.
            cross_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            answer = HTMLResponse(GO_ON.format(url=escape(url))) if cross_site else RedirectResponse(url, 303)
            answer.set_cookie(cookie, brought[-1], httponly=True, samesite="strict")
            answer.headers["cache-control"] = "no-store"
            return answer
        if not brought and any(self.access.known(token) for token in tokens(headers, cookie)):
            return None
        return without_token(headers, scope, url)


def tokens(headers: Headers, cookie: str) -> list[str]:
    """The tokens in a request's headers and in its cookie of that name."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    kept = [cookie_parser(one).get(cookie, "") for one in headers.getlist("cookie")]
    kept += headers.getlist("x-api-key")
    return [*kept, bearer.strip()] if kind.lower() == "bearer" else kept


def allowing(origin: str, send: Send) -> Send:
    """A `send` that lets a page of this origin read the response."""

    async def allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = MutableHeaders(raw=message.setdefault("headers", []))
            found["access-control-allow-origin"] = origin
            found["access-control-expose-headers"] = "retry-after"
            found.add_vary_header("Origin")
        await send(message)

    return allowed


def foreign(headers: Headers, scope: Scope) -> Response | None:
    """403 for a request of another origin's page; following its plain link to the dashboard is allowed."""
    origins = headers.getlist("origin")
    if origins:
        ours = all(origin_host(origin) == headers["host"].lower() for origin in origins)
    else:
        plain_link = (
            headers.get("sec-fetch-mode") == "navigate"
            and scope.get("method") in ("GET", "HEAD")
            and headers.get("sec-fetch-dest", "document") == "document"
        )
        ours = headers.get("sec-fetch-site") not in ("cross-site", "same-site") or plain_link
    if ours:
        return None
    log.warning("refused a request of another site's page for %s", scope["path"])
    other = " Start it with --cors-origin ORIGIN to let that site's pages use the API."
    text = "This request came from a page that is not Moestro's." + (other if of_api(scope) else "")
    return refusal(scope, ApiError(text, status=403), plain=True)


def origin_host(origin: str) -> str | None:
    """Host and port of an Origin header, in lower case; None if it has none."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return None
    return found.netloc.lower() if found.scheme in ("http", "https") and found.netloc else None


def without_token(headers: Headers, scope: Scope, url: str) -> Response:
    """401 in the client's format; for the health route only whether the server is running."""
    if scope["path"] == "/healthz" and scope.get("method") in ("GET", "HEAD"):
        return JSONResponse({"status": "ok"})
    challenge = {"www-authenticate": 'Bearer realm="Moestro"', "cache-control": "no-store"}
    if not of_api(scope) and "text/html" in headers.get("accept", ""):
        return HTMLResponse(REFUSED.format(url=escape(url)), 401, challenge)
    return refusal(scope, ApiError(NO_TOKEN, code="invalid_api_key", status=401), challenge, plain=True)
