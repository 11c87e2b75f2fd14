"""Who is let in, by host, origin and name, and which headers replies have."""

import itertools
import json
import re
import socket
from types import SimpleNamespace

import psutil
import pytest
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from app.server.security import hosts
from app.server.security.access import Access
from app.server.security.gate import Gate
from app.server.security.headers import ALWAYS, policy
from core.errors import MoestroError
from tests.security.asking import LAN, TOKEN, ask, gate

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
    "127.0.0.1:99999",  # no port, and Gradio fails on it
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


@pytest.mark.parametrize(
    ("headers", "status", "named"),
    [
        ([("host", "127.0.0.1:7860"), ("origin", "http://localhost:3000")], 403, "--cors-origin"),
        ([("host", "evil.com")], 400, "--allow-host"),
    ],
)
def test_programs_are_refused_in_the_api_s_own_form(headers: list[tuple[str, str]], status: int, named: str) -> None:
    found, _, body = ask(gate(), *headers, path="/v1/chat/completions", method="POST")
    error = json.loads(body)["error"]
    assert (found, error["type"]) == (status, "invalid_request_error") and named in error["message"]


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


GUEST = "http://localhost:3000"
PREFLIGHT = (("access-control-request-method", "POST"), ("access-control-request-headers", "authorization"))


def test_by_default_no_other_site_s_page_may_use_the_api() -> None:
    for method in ("GET", "POST", "OPTIONS"):
        status, told, _ = ask(
            gate(), ("host", OURS[0]), ("origin", GUEST), *PREFLIGHT, method=method, path="/v1/models"
        )
        assert status == 403
        assert not any(name.startswith("access-control") for name in told)


def test_an_allowed_origin_may_use_the_api_and_nothing_else() -> None:
    app = gate(Access.chosen("127.0.0.1", None, (), [f"{GUEST.upper()}/"]))
    named = (("host", OURS[0]), ("origin", GUEST), ("sec-fetch-site", "same-site"))
    status, told, body = ask(app, *named, path="/v1/chat/completions", method="POST")
    assert (status, body, told["access-control-allow-origin"], told["vary"]) == (200, "inside", GUEST, "Origin")
    assert "access-control-allow-credentials" not in told
    for path in ("/live/frame", "/", "/v1", "/gradio_api/run/predict", "/export/1.zip", "/metrics"):
        assert ask(app, *named, path=path, method="POST")[0] == 403, path
    for other in (*FOREIGN, "http://localhost:30001", "https://localhost:3000"):
        status, told, _ = ask(app, ("host", OURS[0]), ("origin", other), path="/v1/models")
        assert (status, "access-control-allow-origin" in told) == (403, False), other
    assert ask(app, *named, ("origin", "http://evil.example"), path="/v1/models")[0] == 403, "two origins"
    assert ask(app, *named, path="/v1/models", kind="websocket")[0] == 1008
    assert ask(app, ("host", "evil.example"), ("origin", GUEST), path="/v1/models")[0] == 400


def test_an_allowed_page_asks_first_without_the_token_and_then_needs_it() -> None:
    app = gate(Access.chosen("192.168.1.5", TOKEN, (), [GUEST]))
    named = (("host", "192.168.1.5:7860"), ("origin", GUEST))
    status, told, body = ask(app, *named, *PREFLIGHT, method="OPTIONS", path="/v1/chat/completions")
    assert (status, body, told["access-control-allow-origin"]) == (204, "", GUEST)
    assert "POST" in told["access-control-allow-methods"] and "Authorization" in told["access-control-allow-headers"]
    status, told, _ = ask(app, *named, method="POST", path="/v1/chat/completions")
    assert (status, told["access-control-allow-origin"]) == (401, GUEST), "the page can read why"
    assert ask(app, *named, ("authorization", f"Bearer {TOKEN}"), path="/v1/models")[0] == 200
    assert ask(app, *named, method="OPTIONS", path="/v1/models")[0] == 401, "no question of a browser"


@pytest.mark.parametrize("origin", ["*", "null", "localhost:3000", "http://a/b", "http://*.a", "http://u@a", ""])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(MoestroError, match="--cors-origin"):
        Access.chosen("127.0.0.1", None, (), [origin])


def test_anthropic_s_clients_bring_the_token_in_a_header_of_their_own() -> None:
    app = gate(Access("192.168.1.5", TOKEN))
    assert ask(app, ("host", "192.168.1.5"), ("x-api-key", TOKEN))[0] == 200
    assert ask(app, ("host", "192.168.1.5"), ("x-api-key", TOKEN[:-1]))[0] == 401


def test_what_a_client_says_of_a_proxy_does_not_pass() -> None:
    passed: list[bytes] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        passed.extend(name for name, _ in scope["headers"])
        await PlainTextResponse("inside")(scope, receive, send)

    claims = ("forwarded", "x-forwarded-host", "x-forwarded-proto", "x-gradio-server", "x-real-ip", "x-original-url")
    app = Gate(inside, Access("127.0.0.1", TOKEN))
    headers = [(name, "evil.example") for name in claims]
    assert ask(app, ("host", OURS[0]), ("x-api-key", TOKEN), ("accept", "*/*"), *headers)[0] == 200
    assert passed == [b"host", b"accept"]


PATHS = (
    "/ /config /healthz /live/state /live/frame /ui/app.css /ui/pulse.js /theme.css /v1/models "
    "/export/999.zip /nowhere /gradio_api/proxy=x /export/whatif.csv"
).split()


def rules(text: str) -> dict[str, set[str]]:
    return {name: set(sources) for name, *sources in (rule.split() for rule in text.split(";"))}


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_says_what_a_browser_may_do(client: TestClient, path: str) -> None:
    for headers in ({}, {"origin": "http://evil.example"}, {"host": "evil.example"}):
        for method in ("GET", "HEAD", "POST"):
            told = client.request(method, path, headers=headers).headers
            assert {name: told[name] for name in ALWAYS} == ALWAYS
            found = rules(told["content-security-policy"])
            expected = rules(policy())
            if path == "/":
                found["script-src"] = {one for one in found["script-src"] if not one.startswith("'nonce-")}
            assert found == expected, (method, path)


def test_the_policy() -> None:
    found = rules(policy("abc"))
    assert found["img-src"] == {"'self'", "data:"}
    for name in ("media-src", "form-action", "connect-src", "base-uri", "default-src"):
        assert found[name] == {"'self'"}
    assert found["frame-ancestors"] == found["object-src"] == found["frame-src"] == {"'none'"}
    assert found["script-src"] == {"'self'", "'nonce-abc'", "'unsafe-eval'"}
    assert not any("http" in source or "*" in source for sources in found.values() for source in sources)
    assert "sandbox" in rules(policy(sandbox=True))


def test_the_page_s_own_scripts_run_and_no_other(client: TestClient) -> None:
    nonces = set()
    for _ in range(2):
        page = client.get("/", headers={"accept-encoding": "br, gzip"})
        assert page.headers["content-length"] == str(len(page.content))
        tags = re.findall(r"<script[^>]*>", page.text)
        found = set(re.findall(r"'nonce-([^']+)'", page.headers["content-security-policy"]))
        assert len(tags) > 3 and len(found) == 1
        assert all(f'nonce="{next(iter(found))}"' in tag for tag in tags)
        nonces |= found
    assert len(nonces) == 2


def test_an_uploaded_file_cannot_act(client: TestClient) -> None:
    evil = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    for name in ("x.svg", "x.html", "x.trace"):
        path = client.post("/gradio_api/upload", files={"files": (name, evil)}).json()[0]
        told = client.get(f"/gradio_api/file={path}").headers
        assert "sandbox" in rules(told["content-security-policy"])
        assert told["content-disposition"].startswith("attachment")
