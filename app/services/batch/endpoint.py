"""Where a batch is sent: the address of a server, and its key. Neither is repeated in a message before it is known to
hold no secret."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httpx

from app.services.batch.lines import KINDS, Line
from core.errors import MoestroError

GIVE = "Give the address of a server of the OpenAI API, such as http://localhost:8000/v1."
URLS = {kind: url for url, kind in KINDS.items()}
HOST = re.compile(r"[^\s%/\\@]+")
PORTS = range(1, 1 << 16)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `url` without a path's last "/v1"; `retries`: how often one is sent again; `timeout_s`: how
    long one may take."""

    url: str
    key: str = field(default="", repr=False)
    model: str = ""
    retries: int = 5
    timeout_s: float = 600.0

    @classmethod
    def checked(cls, url: str, key: str = "", model: str = "", retries: int = 5, timeout_s: float = 600.0) -> Server:
        """Raises MoestroError for an address or a key that cannot be one."""
        return cls(_address(url), _key(key), model, retries, timeout_s)

    @property
    def host(self) -> str:
        """With its port."""
        return httpx.URL(self.url).netloc.decode()

    def address(self, line: Line) -> str:
        """Of the API that a line asks for."""
        return self.url + URLS[line.kind]


def _address(text: str) -> str:
    try:
        url = httpx.URL(text.strip())
        url.host.encode("idna")  # as the system will: no part of a name is empty or too long
    except (httpx.InvalidURL, UnicodeError):  # UnicodeError: a host that cannot be written in ASCII
        raise MoestroError(f"The endpoint is not an address. {GIVE}") from None
    if url.scheme not in ("http", "https"):
        raise MoestroError(f"The endpoint does not begin with http:// or https://. {GIVE}")
    if url.userinfo:
        raise MoestroError(
            "The endpoint has a user name or a password in it. Leave them out, and give the key as --api-key or in "
            "OPENAI_API_KEY."
        )
    if url.query or url.fragment:
        raise MoestroError(f"The endpoint has a “?” or a “#” in it. Leave out what comes after. {GIVE}")
    if not HOST.fullmatch(url.host) or (url.port is not None and url.port not in PORTS):
        raise MoestroError(f"The endpoint does not name a host and a port that there can be. {GIVE}")
    return str(url).rstrip("/").removesuffix("/v1")


def _key(text: str) -> str:
    key = text.strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise MoestroError(
            "The key has characters that no key has, such as a space or a line break inside. Check --api-key or "
            "OPENAI_API_KEY."
        )
    return key
