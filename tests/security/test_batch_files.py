"""A batch from the page: its form takes no path, and only its own answers are served."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.services.batcher import BatchJob
from app.services.host import Host
from tests.app.conftest import WAIT_S
from tests.security.test_events import Body, find, post

PROMPT = '{"prompt": "hi", "max_tokens": 2}\n'
SECRET = '{"prompt": "the private key of somebody"}\n'


@pytest.fixture(scope="module")
def button(client: TestClient) -> tuple[Body, int]:
    """The event that starts a batch, and the place of the file in its data."""
    return find(client, "batch-upload")


Press = Callable[[object], tuple[int, str]]


@pytest.fixture
def press(client: TestClient, button: tuple[Body, int]) -> Press:
    """Start a batch of a file, as the page's button does."""
    body, at = button
    data = body["data"]
    return lambda file: post(client, {**body, "data": [*data[:at], file, *data[at + 1 :]]})


def uploaded(client: TestClient, name: str, content: str) -> dict[str, Any]:
    (path,) = client.post("/gradio_api/upload", files={"files": (name, content.encode())}).json()
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def over(host: Host) -> BatchJob:
    job = host.batcher.job
    assert job is not None and job.join(WAIT_S)
    return job


def test_the_form_has_no_field_for_a_path(page: FastAPI) -> None:
    mounted: Any = page.routes[-1]
    blocks = mounted.app.get_blocks()
    upload = next(one for one in blocks.blocks.values() if getattr(one, "elem_id", "") == "batch-upload")
    events = [event for event in blocks.fns.values() if upload in event.inputs]
    assert events
    for event in events:
        assert not [one.elem_id for one in event.inputs if isinstance(one, gr.Textbox)]


@pytest.mark.parametrize("name", ["../../x.jsonl", "..\\..\\x.jsonl", "/etc/x.jsonl", "x\0y.jsonl", "ä b.jsonl"])
def test_answers_lie_in_the_data_folder_whatever_the_upload_is_called(
    client: TestClient, host: Host, press: Press, name: str
) -> None:
    assert press(uploaded(client, name, PROMPT)) == (200, "")
    job = over(host)
    assert job.state == "done" and job.answers is not None
    assert job.answers.path.resolve().parent == (host.store.folder / "batches").resolve()
    reply = client.get("/export/batch.jsonl")
    assert reply.status_code == 200 and json.loads(reply.content)["id"] == "line-1"
    assert reply.headers["content-disposition"].isascii()


def test_a_file_that_was_not_uploaded_is_neither_read_nor_served(
    client: TestClient, host: Host, uploads: Path, press: Press, tmp_path: Path
) -> None:
    press(uploaded(client, "before.jsonl", PROMPT))
    before, secret, link = over(host), tmp_path / "secret.jsonl", uploads / "link.jsonl"
    secret.write_text(SECRET, "utf-8")
    paths = [secret, "/etc/passwd", uploads / ".." / "x.jsonl", uploads, "x.jsonl", ""]
    if os.name == "posix":  # elsewhere it takes a right that users rarely have
        link.symlink_to(secret)
        paths.append(link)
    for path in paths:
        status, said = press({"path": str(path), "meta": {"_type": "gradio.FileData"}})
        assert status == 400 and "uploaded" in said, path
    link.unlink(missing_ok=True)
    assert host.batcher.job is before and SECRET not in client.get("/export/batch.jsonl").text


def test_text_in_the_place_of_the_file_is_refused(
    client: TestClient, host: Host, press: Press, button: tuple[Body, int]
) -> None:
    """As the form had it when it took paths."""
    before, (body, _) = host.batcher.job, button
    for strange in ("/etc/passwd", ["/etc/passwd"], {"path": "/etc/passwd"}):
        assert press(strange)[0] == 400
    assert post(client, {**body, "data": ["", None, "/etc/passwd", *body["data"][1:]]})[0] == 400
    assert host.batcher.job is before
