"""The token, idle machines, and no connection that nobody asked for."""

import asyncio
import re
import selectors
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import cli
from app.server.api import build_app
from app.server.security import hosts
from app.server.security.access import Access
from app.server.security.gate import Gate
from app.services.host import Host
from app.ui.serve import OPEN_TO_OTHERS, _announce, build
from core.errors import MoestroError
from tests.app.conftest import open_host
from tests.security.asking import LAN, TOKEN, ask, gate
from tests.security.conftest import HOME

COOKIE = "moestro-token-7860"


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
    monkeypatch.setattr("app.ui.serve.serve", lambda asked, access, **more: seen.append(access))
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


IDLE_S = 60.0


class Jumping(selectors.DefaultSelector):
    """Where its loop has nothing to do, the clock is at once where the next timer is: counted as waking up."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.woken = 0.0, 0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None and timeout > 0:
            self.now_s, self.woken = self.now_s + timeout, self.woken + 1
        return found


@pytest.mark.long(0.1)
def test_an_idle_server_wakes_up_about_once_a_second(tmp_path: Path) -> None:
    host, clock = open_host(tmp_path), Jumping()
    app = build(host)

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.SelectorEventLoop(clock)
        made.time = lambda: clock.now_s  # type: ignore[method-assign]
        return made

    async def idle() -> int:
        async with app.router.lifespan_context(app):
            await asyncio.sleep(1.0)  # what begins with the server
            before = clock.woken
            await asyncio.sleep(IDLE_S)
            return clock.woken - before

    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            assert 0 < runner.run(idle()) < 1.5 * IDLE_S
    finally:
        host.close()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that something wanted to connect to or to look up; it is not let."""
    found: list[str] = []

    def refuse(what: Any) -> None:
        found.append(str(what))
        raise OSError("no connection in this test")

    monkeypatch.setattr(socket.socket, "connect", lambda self, address: refuse(address))
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: refuse(address))
    monkeypatch.setattr(socket.socket, "sendto", lambda self, *told: refuse(told[-1]))
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: (
            refuse(host) if host != "127.0.0.1" else [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]
        ),
    )
    return found


def test_the_page_and_a_chat_need_no_connection(tmp_path: Any, tried: list[str]) -> None:
    with closing(open_host(tmp_path)) as host, TestClient(build(host), base_url=HOME) as client:
        for path in ("/", "/config", "/theme.css", "/live/state", "/live/frame", "/favicon.ico"):
            assert client.get(path).status_code == 200
        page = {"open": False, "chat": None, "stamp": "", "turn": "", "sent": False}
        events = {event["api_name"]: event for event in client.get("/config").json()["dependencies"]}
        known = dict.fromkeys(("stamp", "settings", "library", "loaded", "imported"), "") | {"answers": "0"}
        for name, data in (("open_page", [page, known]), ("_send", ["hello", page, ""])):
            reply = client.post(
                "/gradio_api/run/predict", json={"data": data, "fn_index": events[name]["id"], "session_hash": "me"}
            )
            assert reply.status_code == 200, reply.text
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        assert client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert tried == []
    with pytest.raises(OSError, match="no connection"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    assert tried == ["192.0.2.1"]
