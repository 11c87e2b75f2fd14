"""Where prompts and the key go: to the host that was named, and to no other; what cannot be one is refused first."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import main
from app.services.batch.endpoint import Server
from core.errors import MoestroError
from tests.batch.conftest import Serve
from tests.batch.misbehaving import good, wrong
from tests.batch.test_files import written

KEY = "sk-4711-do-not-print"


def run(folder: Path, url: str, *more: str) -> int:
    """The command's exit code."""
    source = written(folder, *({"prompt": f"p{n}", "id": n} for n in range(4)))
    try:
        return main(["batch", "--in", str(source), "--out", str(folder / "out"), "--endpoint", url, *more])
    except SystemExit as refused:  # argparse's way
        return int(str(refused.code))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(tmp_path: Path, serve: Serve, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    other = serve(lambda number, body: good(body))
    secret = f"{other.url.replace('://', '://user:hidden@')}/chat/completions?token=hidden"
    server = serve(lambda number, body: wrong(status, location=secret))
    assert run(tmp_path, server.url, "--api-key", KEY) == 2
    said = capsys.readouterr().err
    assert other.asked == [], "neither the key nor a prompt went there"
    assert f"127.0.0.1:{other.server_address[1]}" in said and f"127.0.0.1:{server.server_address[1]}" in said
    assert "swordfish" not in said and KEY not in said and "Unexpected" not in said
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("location", ["", "/elsewhere", "http://[", "//\x7f", "javascript:x"])
def test_a_redirect_to_nowhere(tmp_path: Path, serve: Serve, location: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(lambda number, body: wrong(302, location=location))
    assert run(tmp_path, server.url) == 2
    assert "redirects to another address" in capsys.readouterr().err


def test_a_key_that_the_server_repeats_is_not_printed(
    tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    server = serve(lambda number, body: wrong(401, f"wrong key {KEY}\x1b[2J"))
    assert run(tmp_path, server.url) == 2
    said = capsys.readouterr().err
    assert server.asked[0][1] == f"Bearer {KEY}"
    assert "does not accept the key (401: wrong key ..." in said and "\x1b" not in said and KEY not in said


def test_a_key_that_is_missing_is_asked_for(
    tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert run(tmp_path, serve(lambda number, body: wrong(401)).url) == 2
    assert "asks for a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "http://"),
        ("  ", "http://"),
        ("localhost:8000/v1", "http://"),
        ("//localhost/v1", "http://"),
        ("ftp://localhost/v1", "http://"),
        ("file:///etc/passwd", "http://"),
        ("http://", "a host"),
        ("http:///v1", "a host"),
        ("http://exa mple/v1", "a host"),
        ("http://localhost:99999/v1", "a host and a port"),
        ("http://localhost:0/v1", "a host and a port"),
        ("http://localhost:x/v1", "not an address"),
        ("http://[::1/v1", "not an address"),
        ("http://local\nhost/v1", "not an address"),
        ("http://" + "a" * 300, "not an address"),
        ("http://.../v1", "not an address"),
        ("http://me:hidden@localhost/v1", "a user name"),
        ("http://hidden@localhost/v1", "a user name"),
        ("http://localhost/v1?key=hidden", "“?”"),
        ("http://localhost/v1#hidden", "“#”"),
        ("http://me:hidden@local host/v1", "The endpoint"),
        ("http://me:hidden@localhost:x/v1", "not an address"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_without_what_is_secret_in_it(url: str, said: str) -> None:
    with pytest.raises(MoestroError) as refused:
        Server.checked(url)
    assert said in str(refused.value) and "hidden" not in str(refused.value)


@pytest.mark.parametrize("url", ["", "http://me:hidden@localhost/v1"])
def test_an_address_is_checked_before_anything(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, url) == 2
    words = capsys.readouterr().err
    assert words.startswith("The endpoint ") and "hidden" not in words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more",
    [
        ("--retries", "-1"),
        ("--retries", "x"),
        ("--retries", "1.5"),
        ("--timeout", "0"),
        ("--timeout", "-1"),
        ("--timeout", "nan"),
        ("--timeout", "inf"),
        ("--timeout", "1e300"),
        ("--api-key", "a\nb"),
        ("--api-key", "a b"),
        ("--api-key", "schlüssel"),
    ],
)
def test_numbers_and_keys_that_cannot_be_are_refused_before_anything(
    tmp_path: Path, more: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "http://127.0.0.1:9/v1", *more) == 2
    said = capsys.readouterr().err
    assert "Unexpected" not in said and (more[0] != "--api-key" or more[1] not in said)
    assert not (tmp_path / "out").exists()


def test_a_proxy_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://me:swordfish@127.0.0.1:9")
    assert run(tmp_path, "https://127.0.0.1:9/v1", "--retries", "0") == 2
    said = capsys.readouterr().err
    assert "Unexpected" not in said and "ALL_PROXY" in said and "swordfish" not in said


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_is_taken_with_and_without_its_end(tmp_path: Path, serve: Serve, end: str) -> None:
    server = serve(lambda number, body: good(body))
    assert run(tmp_path, server.url.removesuffix("/v1") + end) == 0
    assert {path for path, _, _ in server.asked} == {"/v1/chat/completions"}
