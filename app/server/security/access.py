"""Who may use the server: where it listens, the names it answers to, and the token that is needed from elsewhere."""

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
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*")


@dataclass(frozen=True, slots=True)
class Access:
    """How the server can be reached. Raises MoestroError for an address beyond this machine without a token.

    `address`: what it binds to. `names`: others than its own that it may be called by. `token`: None = none is asked
    for; a token that is given is asked for wherever a request comes from.
    """

    address: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()

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

    @classmethod
    def chosen(cls, address: str, token: str | None = None, names: Iterable[str] = ()) -> Access:
        """As the user asks; beyond this machine a token is made up unless there is one. Raises MoestroError."""
        address = hosts.plain(address)
        if not token and not hosts.is_loopback(address):
            token = secrets.token_urlsafe(32)
        return cls(address, token or None, tuple(hosts.plain(name) for name in names))

    @property
    def local(self) -> bool:
        """Can this machine alone reach it?"""
        return hosts.is_loopback(self.address)

    @property
    def trusted(self) -> frozenset[str]:
        """Names in a Host header that are answered."""
        return hosts.trusted(self.address, self.names)

    def known(self, token: str | None) -> bool:
        """Is this the token? The answer takes as long for a wrong one. Without a token everything is known."""
        if self.token is None:
            return True
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def urls(self, port: int) -> list[str]:
        """What to open in a browser, with the token that it needs."""
        return [f"{url}/?token={self.token}" if self.token else url for url in hosts.urls(self.address, port)]
