"""What a browser is told about every answer, and that the dashboard's own page abides by it."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from app.server.security.headers import ALWAYS, policy

PATHS = [
    "/",
    "/config",
    "/healthz",
    "/live/state",
    "/live/frame",
    "/ui/app.css",
    "/ui/pulse.js",
    "/theme.css",
    "/v1/models",
    "/export/999.zip",
    "/nowhere",
    "/gradio_api/proxy=x",
    "/export/whatif.csv",
]


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
