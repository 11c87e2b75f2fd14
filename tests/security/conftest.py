"""The whole web application with Gradio's page over the fake engine, built once: that takes seconds."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.services.host import Host
from app.ui.serve import build
from tests.app.conftest import open_host

HOME = "http://127.0.0.1:7860"


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """It outlives these tests, so it starts no process of its own: others count those that there are."""
    host = open_host(tmp_path_factory.mktemp("home"))
    assert host.models.change_many({"regret": False}) == ""
    yield host
    host.close()


LEFT = "0af3" * 16  # the name of a folder as Gradio makes it


@pytest.fixture(scope="session")
def uploads(host: Host) -> Iterator[Path]:
    """Gradio's folder of uploads, with something in it that an earlier start left."""
    folder = host.store.folder / "uploads"
    (folder / LEFT).mkdir(parents=True)
    (folder / LEFT / "left.trace").write_bytes(b"x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", "")  # as it was, afterwards
        yield folder


@pytest.fixture(autouse=True)
def _its_own_uploads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests build applications, too, and each sets Gradio's folder to its own."""
    if "uploads" in request.fixturenames:
        monkeypatch.setenv("GRADIO_TEMP_DIR", str(request.getfixturevalue("uploads").resolve()))


@pytest.fixture(scope="session")
def page(host: Host, uploads: Path) -> FastAPI:
    return build(host)


@pytest.fixture(scope="session")
def client(page: FastAPI) -> Iterator[TestClient]:
    with TestClient(page, base_url=HOME, raise_server_exceptions=False) as client:
        yield client


@cache
def config(client: TestClient) -> dict[str, Any]:
    """The page as Gradio describes it to a browser: components and events. Change nothing in it."""
    described: dict[str, Any] = client.get("/config").json()
    return described
