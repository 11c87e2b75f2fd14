"""Who is let in: every combination of name, origin and way of asking; tokens; the addresses that are printed."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import cli
from app.serve import OPEN_TO_OTHERS, _announce
from app.server.api import build_app
from app.server.security import hosts
from app.server.security.access import Access
from app.server.security.gate import Gate
from app.services.host import Host
from core.errors import MoestroError
from tests.security.conftest import HOME

TOKEN = "a-token_of.this~test"
COOKIE = "moestro-token-7860"
LAN = "http://192.168.1.5:7860"
OURS = ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "LOCALHOST:7860"]
NOT_OURS = [
    "evil.example",
    "evil.example:7860",
    "127.0.0.1.evil.example:7860",
    "localhost.evil.example",
    "127.0.0.1@evil",
    "[::1",
    "::1",
    "[::2]:7860",
    "0.0.0.0:7860",
    "",
    " ",
    "127.0.0.1:7860, evil.example",
    "169.254.1.1",
]
FOREIGN = [
    "http://evil.example",
    "http://127.0.0.1:9999",
    "http://127.0.0.1",
    "http://127.0.0.1:7860.evil.example",
    "null",
    "http://[::1",
    "file://",
    "http://evil@127.0.0.1:7860",
    "data:",
    "",
    "127.0.0.1:7860",
    "chrome-extension://127.0.0.1:7860",
]


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


# -- names and origins -------------------------------------------------------------------------------------------------


def test_no_request_of_another_site_is_answered() -> None:
    """Each name of the server, each foreign origin, each kind of request that carries it."""
    app, count = gate(), 0
    for host, origin, method, kind in itertools.product(
        OURS, FOREIGN, ("GET", "POST", "OPTIONS", "DELETE"), ("http", "websocket")
    ):
        for more in ([], [("sec-fetch-site", "same-origin")], [("origin", f"http://{host}")]):
            status, _, body = ask(app, ("host", host), ("origin", origin), *more, method=method, kind=kind)
            assert (status, body) in ((403, "This request came from a page that is not Moestro's."), (1008, ""))
            count += 1
    assert count > 1000


def test_a_browser_s_word_for_another_site_is_enough() -> None:
    for host, site, mode, dest, method in itertools.product(
        OURS,
        ("cross-site", "same-site"),
        ("no-cors", "cors", "navigate", "websocket", ""),
        ("document", "iframe", "object", "image", "script", "empty"),
        ("GET", "POST"),
    ):
        link = mode == "navigate" and dest == "document" and method == "GET"
        status, _, _ = ask(
            gate(),
            ("host", host),
            ("sec-fetch-site", site),
            ("sec-fetch-mode", mode),
            ("sec-fetch-dest", dest),
            method=method,
        )
        assert status == (200 if link else 403), (site, mode, dest, method)


def test_our_own_pages_and_programs_are_answered() -> None:
    for host in OURS:
        assert ask(gate(), ("host", host))[0] == 200
        for scheme, site in itertools.product(("http", "https"), ("same-origin", "none")):
            told = (("host", host), ("origin", f"{scheme}://{host.lower()}"), ("sec-fetch-site", site))
            assert ask(gate(), *told)[2] == "inside"
            assert ask(gate(), *told, method="POST")[2] == "inside"


def test_no_other_name_is_answered() -> None:
    for host in NOT_OURS:
        for more in ([], [("origin", f"http://{host}")], [("x-forwarded-host", "localhost")]):
            assert ask(gate(), ("host", host), *more)[0] == 400, host
    assert ask(gate())[0] == 400
    assert ask(gate(), ("host", "localhost"), ("host", "evil.example"))[0] == 400


def test_a_name_can_be_allowed() -> None:
    app = gate(Access("0.0.0.0", TOKEN, ("Box.example", "fd00::5")))
    for host in ("box.example", "BOX.EXAMPLE:7860", "[fd00::5]:7860"):
        assert ask(app, ("host", host), ("authorization", f"Bearer {TOKEN}"))[0] == 200
    assert ask(app, ("host", "a.box.example"), ("authorization", f"Bearer {TOKEN}"))[0] == 400


def test_the_whole_application_is_behind_the_gate(client: TestClient) -> None:
    for path in ("/", "/config", "/healthz", "/live/state", "/ui/app.css", "/v1/models", "/export/1.zip"):
        assert client.get(path, headers={"origin": "http://evil.example"}).status_code == 403, path
        assert client.get(path, headers={"host": "evil.example"}).status_code == 400, path


def test_the_server_s_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "eth0": [("192.168.1.5", socket.AF_INET), ("fe80::1%eth0", socket.AF_INET6), ("fd00::7", socket.AF_INET6)],
        "lo": [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)],
        "usb": [("169.254.3.3", socket.AF_INET), ("00:11:22:33:44:55", 17)],
    }
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            name: [SimpleNamespace(address=address, family=family) for address, family in card]
            for name, card in cards.items()
        },
    )
    assert hosts.trusted("127.0.0.1") == {"127.0.0.1", "localhost", "::1"}
    assert hosts.trusted("192.168.1.5") == {"127.0.0.1", "localhost", "::1", "192.168.1.5"}
    everywhere = hosts.trusted("0.0.0.0", ["Box"])
    assert {"192.168.1.5", "fd00::7", "box"} < everywhere and "*" not in everywhere
    assert hosts.urls("127.0.0.1", 1) == ["http://127.0.0.1:1"]
    assert hosts.urls("::1", 1) == ["http://[::1]:1"]
    assert hosts.urls("0.0.0.0", 7860) == [LAN]
    assert hosts.urls("::", 7860) == ["http://[fd00::7]:7860"]
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert hosts.urls("0.0.0.0", 1) == ["http://127.0.0.1:1"]


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "alone"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.5", False),
        ("no.such.name.invalid", False),
    ],
)
def test_beyond_this_machine_a_token_is_needed(address: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def offline(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror("not found")
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    if alone:
        assert Access.chosen(address) == Access(hosts.plain(address))
        return
    with pytest.raises(MoestroError, match="token"):
        Access(address)
    made = [Access.chosen(address).token or "" for _ in range(3)]
    assert len(set(made)) == 3 and all(len(token) >= 40 for token in made)
    assert made[0] not in repr(Access(address, made[0]))


@pytest.mark.parametrize(
    "token", ["short", "x" * 257, "with a blank in it.", "with;semicolon;in;it", "mit-Ümlaut-darin"]
)
def test_a_token_that_will_not_do_is_refused(token: str) -> None:
    with pytest.raises(MoestroError, match="A token has 16 to 256 characters"):
        Access.chosen("0.0.0.0", token)


@pytest.mark.parametrize("name", ["*", "http://box", "box:7860", "a b", "*.box", "", "box/"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(MoestroError, match="--allow-host"):
        Access.chosen("127.0.0.1", None, [name])


def lan() -> Gate:
    return gate(Access("192.168.1.5", TOKEN))


def test_without_the_token_nothing_is_answered() -> None:
    host, wrong = ("host", "192.168.1.5:7860"), "b-token_of.this~test"
    for more in (
        [],
        [("authorization", f"Bearer {wrong}")],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", TOKEN)],
        [("cookie", f"{COOKIE}={wrong}")],
        [("cookie", f"other={TOKEN}")],
        [("cookie", f"{COOKIE}=")],
        [("cookie", f"moestro-token-7861={TOKEN}")],
        [("authorization", "Bearer ")],
        [("token", TOKEN)],
    ):
        for path, query in (
            ("/", ""),
            ("/", f"token={wrong}"),
            ("/", "token="),
            ("/live/state", ""),
            ("/ui/app.css", ""),
            ("/live/state", f"token={TOKEN}"),
            ("/v1/models", f"token={TOKEN}"),
            ("/export/1.zip", ""),
        ):
            status, told, body = ask(lan(), host, *more, path=path, query=query)
            assert (status, told["www-authenticate"]) == (401, 'Bearer realm="Moestro"')
            assert "set-cookie" not in told and TOKEN not in body
        assert ask(lan(), host, *more, kind="websocket")[0] == 1008
    assert ask(lan(), host, method="POST", path="/", query=f"token={TOKEN}")[0] == 401


def test_the_refusal_is_said_as_the_asker_reads() -> None:
    host = ("host", "192.168.1.5:7860")
    status, told, body = ask(lan(), host, ("accept", "text/html,*/*"), path="/", query="chat=3&x=%22%3E%3Cscript%3E")
    assert (status, told["content-type"]) == (401, "text/html; charset=utf-8")
    assert "Open the address" in body and 'href="/?chat=3&amp;x=%22%3E%3Cscript%3E"' in body
    assert '"code":"invalid_api_key"' in ask(lan(), host, path="/v1/chat/completions", method="POST")[2]
    assert ask(lan(), host, path="/live/frame")[2].startswith("This Moestro asks for a token.")
    assert ask(lan(), host, path="/healthz")[::2] == (200, '{"status":"ok"}')


def test_a_program_brings_the_token_in_its_header() -> None:
    for word in ("Bearer", "bearer"):
        assert ask(lan(), ("host", "192.168.1.5:7860"), ("authorization", f"{word} {TOKEN}"))[2] == "inside"
    assert (
        ask(
            lan(), ("host", "192.168.1.5:7860"), ("authorization", f"Bearer {TOKEN}"), ("origin", "http://evil.example")
        )[0]
        == 403
    )


def test_a_browser_brings_it_once_and_then_as_a_cookie() -> None:
    host = ("host", "192.168.1.5:7860")
    status, told, body = ask(lan(), host, ("sec-fetch-site", "none"), path="/", query=f"chat=3&token={TOKEN}")
    assert (status, told["location"], body) == (303, "/?chat=3", "")
    cookie = told["set-cookie"]
    assert cookie.startswith(f"{COOKIE}={TOKEN};")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert ask(lan(), host, ("cookie", f"a=b; {COOKIE}={TOKEN}"))[2] == "inside"
    # a link on another site: what the page asks for next is its own, a redirect would not be
    status, told, body = ask(
        lan(), host, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), path="/", query=f"token={TOKEN}"
    )
    assert status == 200 and 'content="0; url=/"' in body and TOKEN not in body and "set-cookie" in told


def test_a_token_opens_the_real_application(host: Host) -> None:
    app = build_app(host, access=Access("192.168.1.5", TOKEN))
    with TestClient(app, base_url=LAN) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).json()["data"][0]["id"] == "demo"
        client.get(f"/?token={TOKEN}")
        assert client.get("/healthz").json()["model"] == "demo"


def test_this_machine_needs_no_token_unless_one_is_given() -> None:
    assert ask(gate(), ("host", "localhost:7860"))[0] == 200
    assert ask(gate(Access(token=TOKEN)), ("host", "localhost:7860"))[0] == 401


def test_what_is_printed_can_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = SimpleNamespace(started=True)
    _announce(server, Access("192.168.1.5", TOKEN), 7860, False, None)
    printed = capsys.readouterr().out
    assert f"{LAN}/?token={TOKEN} " in printed and OPEN_TO_OTHERS in printed
    _announce(server, Access(), 7860, False, None)
    assert capsys.readouterr().out == f"Moestro is ready: {HOME}   (Ctrl-C ends it)\n"


def test_the_command_line_chooses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Access] = []
    monkeypatch.setattr("app.serve.serve", lambda asked, access, **more: seen.append(access))
    monkeypatch.delenv("MOESTRO_TOKEN", raising=False)
    assert cli.main(["--no-browser"]) == 0
    assert cli.main(["--address", "0.0.0.0", "--allow-host", "box", "--allow-host", "[fd00::5]"]) == 0
    assert cli.main(["--address", "0.0.0.0", "--token", TOKEN]) == 0
    monkeypatch.setenv("MOESTRO_TOKEN", TOKEN)
    assert cli.main(["--address", "0.0.0.0"]) == 0
    assert (seen[0], seen[1].names, seen[2].token, seen[3].token) == (Access(), ("box", "fd00::5"), TOKEN, TOKEN)
    assert re.fullmatch(r"[\w-]{40,}", seen[1].token or "")
    assert cli.main(["--address", "0.0.0.0", "--token", "short"]) == 2
    assert "16" in capsys.readouterr().err
