"""Access settings: the listening address, the host names, and the token required from other machines."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.server.security import hosts
from core.errors import MoestroError

SHORTEST, LONGEST = 16, 256
TOKEN = re.compile(r"[A-Za-z0-9._~-]+")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*")


@dataclass(frozen=True, slots=True)
class Access:
    """How the server can be reached. Raises MoestroError for a non-loopback address without a token.

    `address`: the bind address. `names`: additional host names. `token`: None = none required; a given token is
    required of every request. `origins`: the origins of pages of other sites that may use the API."""

    address: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.token is None and not hosts.is_loopback(self.address):
            raise MoestroError(
                f"At {self.address or 'every address'} others on the network could use Moestro. Give a "
                "token that they must know, or listen on 127.0.0.1."
            )
        if self.token is not None and not (SHORTEST <= len(self.token) <= LONGEST and TOKEN.fullmatch(self.token)):
            raise MoestroError(f"A token has {SHORTEST} to {LONGEST} characters: letters, digits and . _ ~ - alone.")
        for name in self.names:
            if not NAME.fullmatch(name):
                raise MoestroError(
                    f"{name!r} is not a host's name: give it without http://, port and *, for example "
                    "--allow-host box.example."
                )
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise MoestroError(
                    f"{origin!r} is not the origin of a page: give its address without path, for example "
                    "--cors-origin http://localhost:3000. Every origin at once, *, cannot be given."
                )

    @classmethod
    def chosen(
        cls, address: str, token: str | None = None, names: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> Access:
        """From the user's options; a non-loopback address without a token gets a generated one. Raises MoestroError."""
        address = hosts.plain(address)
        if not token and not hosts.is_loopback(address):
            token = secrets.token_urlsafe(32)
        allowed = tuple([origin.strip().rstrip("/").lower() for origin in origins])
        return cls(address, token or None, tuple(hosts.plain(name) for name in names), allowed)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return hosts.is_loopback(self.address)

    @property
    def trusted(self) -> frozenset[str]:
        """Accepted names in a Host header."""
        return hosts.trusted(self.address, self.names)

    def known(self, token: str | None) -> bool:
        """Whether this is the token, compared in constant time. Always true without a token."""
        if self.token is None:
            return True
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def urls(self, port: int) -> list[str]:
        """URLs to open in a browser, with the token if required."""
        return [f"{url}/?token={self.token}" if self.token else url for url in hosts.urls(self.address, port)]
