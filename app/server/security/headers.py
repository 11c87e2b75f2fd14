"""Browser security headers: no foreign content, no framing, no forms to other sites.

Gradio's page has a few inline scripts of its own; each response gives them a nonce, so that any other inline script,
such as an `onclick`, does not run. Gradio compiles the handlers of its components (`unsafe-eval`) and sets inline
styles (`unsafe-inline` for styles), so these two must be allowed."""

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FEATURES = (
    *(
        "accelerometer autoplay camera display-capture encrypted-media geolocation gyroscope magnetometer microphone "
        "midi payment usb screen-wake-lock xr-spatial-tracking"
    ).split(),
)
ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": ", ".join(f"{feature}=()" for feature in FEATURES),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
SCRIPT = re.compile(rb"<script(?=[\s>])")
FILES = "/gradio_api/file="


def policy(nonce: str = "", sandbox: bool = False) -> str:
    """The Content-Security-Policy of a page whose inline scripts carry `nonce`; other inline scripts do not run."""
    inline = f" 'nonce-{nonce}'" if nonce else ""
    rules = [
        "default-src 'self'",
        f"script-src 'self'{inline} 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "media-src 'self'",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "frame-src 'none'",
        "worker-src 'self'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
    return "; ".join([*rules, "sandbox"] if sandbox else rules)


class SecurityHeaders:
    """Adds the headers to every response, and the nonce to the scripts of the dashboard's page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        page = scope["path"] == "/"
        nonce = secrets.token_urlsafe(16) if page else ""
        if page:  # its scripts are modified below, so it must be uncompressed
            scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != b"accept-encoding"]}
        start: Message = {}
        parts: list[bytes] = []

        async def marked(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers.update(ALWAYS | {"content-security-policy": policy(nonce, scope["path"].startswith(FILES))})
                if page:
                    headers["cache-control"] = "no-store"
                    start = message
                    return
            elif page and message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                body = SCRIPT.sub(f'<script nonce="{nonce}"'.encode(), b"".join(parts))
                if body:  # HEAD has none
                    MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
                await send(start)
                message = {**message, "body": body}
            await send(message)

        await self.app(scope, receive, marked)
