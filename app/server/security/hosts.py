"""Host names and addresses that the server accepts, and the URLs under which it can be opened."""

import ipaddress
import re
import socket
from collections.abc import Iterable

import psutil

EVERYWHERE = ("0.0.0.0", "::", "")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_PORT = 65535
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@?#\s]+))(?::([0-9]{1,5}))?")


def plain(address: str) -> str:
    """An address as sockets need it: "[::1]" without its brackets."""
    address = address.strip()
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def bracketed(address: str) -> str:
    """An address as in a URL: "::1" in brackets."""
    return f"[{address}]" if ":" in address else address


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address. A name counts if it resolves to such addresses only."""
    if address in EVERYWHERE:
        return False
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def trusted(address: str, more: Iterable[str] = ()) -> frozenset[str]:
    """Accepted host names of a server bound to `address`: its own machine's, and `more`. In lower case."""
    names = {*LOOPBACK, *more}
    if address in EVERYWHERE:
        names |= {*own_addresses(), socket.gethostname()}
    else:
        names.add(address)
    return frozenset(name.lower() for name in names)


def own_addresses() -> list[str]:
    """IP addresses of this machine, those most useful in a URL first."""
    cards = [one for card in psutil.net_if_addrs().values() for one in card]
    found = [one.address for one in cards if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address]
    return sorted(found, key=_local)


def urls(address: str, port: int) -> list[str]:
    """URLs of the dashboard, best first; at least one."""
    if address not in EVERYWHERE:
        return [f"http://{bracketed(address)}:{port}"]
    kinds = {"0.0.0.0": (4,), "::": (6,), "": (4, 6)}[address]
    found = [one for one in own_addresses() if not _local(one) and ipaddress.ip_address(one).version in kinds]
    found = found or ["::1" if address == "::" else "127.0.0.1"]
    return [f"http://{bracketed(one)}:{port}" for one in found]


def named_host(header: str) -> str | None:
    """The name or address in a Host header, in lower case without port and brackets; None if invalid."""
    found = HOST.fullmatch(header)
    if found is None or int(found[3] or 0) > LAST_PORT:
        return None
    return (found[1] or found[2]).lower()


def _local(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return found.is_loopback or found.is_link_local
