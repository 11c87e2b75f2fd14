"""What Gradio would do for whoever asks: hand out files, fetch addresses, believe headers. None of it here."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.server.security import gradio_guard
from app.ui.page import PAGES
from tests.security.conftest import HOME, config
from tests.selection import layered

SECRET = "the private key of somebody"
WAYS = ("run/predict", "api/predict", "call/{name}", "call/v2/{name}", "run/{name}", "queue/join")


def named(path: object) -> dict[str, Any]:
    """As a browser would name an uploaded file."""
    return {"path": str(path), "url": None, "orig_name": "x.trace", "meta": {"_type": "gradio.FileData"}}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "id.trace").write_text(SECRET)
    return tmp_path / "id.trace"


def copied(*folders: Path) -> list[Path]:
    """Files below that hold the secret."""
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and SECRET in path.read_text()]


@pytest.mark.parametrize("every_way", layered([False, True], quick=lambda every: not every))
def test_no_event_copies_a_file_that_was_not_uploaded(
    client: TestClient, uploads: Path, secret: Path, every_way: bool
) -> None:
    """Each event one way, the ways in turn; with `--all`, each event every way."""
    file = named(secret)
    shapes = [file, [file], {"value": {"deep": [file]}}]
    events = config(client)["dependencies"]
    assert len(events) > 100
    for number, event in enumerate(events):
        value = shapes[number % len(shapes)]
        body = {
            "data": [value for _ in event["inputs"]],
            "event_data": value,
            "fn_index": event["id"],
            "session_hash": "me",
        }
        for way in WAYS if every_way else (WAYS[number // len(shapes) % len(WAYS)],):
            reply = client.post(f"/gradio_api/{way.format(name=event['api_name'])}", json=body)
            assert reply.status_code in (400, 404), (event["api_name"], way, reply.text)
    assert copied(uploads) == []


@pytest.mark.parametrize("one_in", layered([6, 1], quick=lambda one_in: one_in == 6))
def test_gradio_itself_refuses_too(
    client: TestClient, page: FastAPI, uploads: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, one_in: int
) -> None:
    """The check that mounting leaves out, without the guard before it."""
    monkeypatch.setattr(gradio_guard.GradioGuard, "_wrong", lambda self, event: "")
    monkeypatch.setattr(gradio_guard, "uploaded", lambda path: True)
    events = [event for event in config(client)["dependencies"] if event["inputs"]]
    assert len(events) > 100
    for event in events[::one_in]:
        body = {"data": [named(secret) for _ in event["inputs"]], "fn_index": event["id"], "session_hash": "me"}
        assert client.post("/gradio_api/run/predict", json=body).status_code == 500, event["api_name"]
    assert copied(uploads) == []
    assert client.get(f"/gradio_api/file={secret}").status_code == 403


def test_an_uploaded_file_is_used(client: TestClient, uploads: Path) -> None:
    paths = client.post("/gradio_api/upload", files={"files": ("my.trace", b"routing")}).json()
    assert client.get(f"/gradio_api/file={paths[0]}").content == b"routing"
    events = config(client)["dependencies"]
    taken = next(event for event in events if any("upload" in target for target in event["targets"]))
    reply = client.post("/gradio_api/run/predict", json={"data": [], "fn_index": taken["id"], "session_hash": "me"})
    assert reply.status_code == 200, reply.text


def routes(app: Any) -> Iterator[str]:
    """Paths of all routes, those of included routers among them."""
    for route in app.routes:
        if inner := getattr(route, "original_router", None):
            yield from routes(inner)
        elif path := getattr(route, "path", ""):
            yield path


@pytest.mark.parametrize(
    "path",
    [
        "https://example.org/x.trace",
        "file:///etc/hostname",
        "/etc/hostname",
        "\0",
        "a" * 9999,
        "{uploads}/../id.trace",
        "{secret}",
        "{uploads}/link",
    ],
)
def test_addresses_links_and_paths_out_of_the_folder_are_refused(
    client: TestClient, uploads: Path, secret: Path, path: str
) -> None:
    link = uploads / "link"
    link.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere it takes a right that users rarely have
        link.symlink_to(secret)
    path = path.format(uploads=uploads, secret=secret)
    body = {"data": [named(path)], "fn_index": 136, "session_hash": "me"}
    assert client.post("/gradio_api/run/predict", json=body).status_code == 400
    if "\0" not in path:
        assert client.get(f"/gradio_api/file={path}").status_code == 404


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_event_is_refused(client: TestClient, body: bytes) -> None:
    reply = client.post("/gradio_api/run/predict", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
@pytest.mark.parametrize(
    ("kind", "status"),
    [("application/json", 200), ("Application/JSON; charset=x", 200), ("text/plain", 415), ("", 415), (None, 415)],
)
def test_an_event_in_any_encoding_is_taken_or_refused(
    client: TestClient, encoding: str, kind: str | None, status: int
) -> None:
    """Gradio's own validation fails on bytes that are no UTF-8, and responds 500."""
    number = next(
        one["id"] for one in config(client)["dependencies"] if not one["inputs"] and one.get("backend_fn", True)
    )
    body = json.dumps({"data": [], "fn_index": number, "session_hash": "me"}).encode(encoding)
    headers = {} if kind is None else {"content-type": kind}
    reply = client.post("/gradio_api/run/predict", content=body, headers=headers)
    assert reply.status_code == status, reply.text


def test_gradio_reads_the_values_that_were_checked(client: TestClient) -> None:
    """Of two fields with one name, or of a number that is written strangely, there is only one reading."""
    number = next(
        one["id"] for one in config(client)["dependencies"] if not one["inputs"] and one.get("backend_fn", True)
    )
    body = f'{{"data": [], "fn_index": 99999, "fn_index": {number}, "session_hash": "me"}}'.encode()
    reply = client.post("/gradio_api/run/predict", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200


def test_routes_that_the_dashboard_does_not_use_do_not_answer(client: TestClient, page: FastAPI) -> None:
    mounted: Any = page.routes[-1]
    known = set(routes(mounted.app))
    assert {"/gradio_api/proxy={url_path:path}", "/gradio_api/component_server", "/monitoring"} <= known
    open_ = {path for path in known if client.get(path).status_code != 404}
    pages = "/ /config /config/ /theme.css /favicon.ico /robots.txt /manifest.json"
    assert open_ == {*pages.split(), *(f"/gradio_api/{name}" for name in ("upload", "upload_progress", "app_id"))}


@pytest.mark.parametrize(
    "path",
    [
        "/ui/deck/__init__.py",
        "/ui/deck/__pycache__/",
        "/ui/../serve.py",
        "/app/serve.py",
        "/ui/deck/deck.html",
        "/assets/../../serve.py",
        "/static/..%2f..%2froutes.py",
        "/assets/" + "a" * 5000,
    ],
)
def test_no_source_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code in (403, 404)


@pytest.mark.long(0.1)
def test_where_a_proxy_claims_to_be_is_not_believed(client: TestClient) -> None:
    plain = client.get("/config").json()["root"]
    told = {
        "x-forwarded-host": "evil.example",
        "x-forwarded-proto": "https",
        "forwarded": "host=evil.example",
        "x-forwarded-for": "10.0.0.1",
        "x-forwarded-prefix": "/evil",
        "x-gradio-server": "http://evil.example",
        "x-original-host": "evil.example",
    }
    assert plain == HOME
    for path in ("/", "/config"):
        for headers in (told, *({name: value} for name, value in told.items())):
            text = client.get(path, headers=headers).text
            assert "evil" not in text and json.dumps(HOME)[1:-1] in text, headers


def test_a_gradio_that_does_not_check_is_not_used() -> None:
    with pytest.raises(RuntimeError, match="Gradio"):
        gradio_guard.mark_launched(object())
    with gr.Blocks() as blocks:
        gr.Textbox()
    gradio_guard.mark_launched(blocks)
    assert blocks.has_launched is True
    assert not gradio_guard.uploaded("/etc/hostname")


def test_the_queue_that_nothing_is_put_into_rests(page: FastAPI) -> None:
    queue = page.routes[-1].app.blocks._queue  # type: ignore[attr-defined]
    assert queue.sleep_when_free == queue.progress_update_sleep_when_free == gradio_guard.IDLE_S
    with gr.Blocks() as blocks:
        gr.Button().click(lambda: None, None, None)
    with pytest.raises(RuntimeError, match="queue=False"):
        gradio_guard.rest_queue(blocks)


@pytest.mark.long(0.1)
def test_pages_of_the_past_are_not_kept_for_ever(
    client: TestClient, page: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = page.routes[-1].app.state_holder  # type: ignore[attr-defined]
    assert held.capacity == PAGES
    monkeypatch.setattr(held, "capacity", len(held.session_data) + 2)  # a page takes a while to copy
    for number in range(6):
        assert held[f"page {number}"]
    assert len(held.session_data) == held.capacity
