"""Uploads stay in the user's data folder, closed to others, limited in all, and do not outlive a start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse

from app.exports.archive import write as write_export
from app.exports.traces import find
from app.exports.traces import write as write_trace
from app.serve import build
from app.server.uploads import MOST_BYTES, ROUTE, UploadLimit, bytes_in, prepare
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.host import Host
from app.store.private import private_folder
from tests.app.conftest import WAIT_S, ended, open_host
from tests.security.conftest import HOME, LEFT


def test_an_upload_lies_in_the_data_folder(client: TestClient, host: Host, uploads: Path) -> None:
    assert not (uploads / LEFT).exists(), "what an earlier start left is still there"
    before = bytes_in(uploads)
    answer = client.post(ROUTE, files={"files": ("a.trace", b"some bytes")})
    assert answer.status_code == 200
    (path,) = answer.json()
    assert Path(path).read_bytes() == b"some bytes"
    assert Path(path).is_relative_to(host.store.folder / "uploads")
    assert bytes_in(uploads) - before == len(b"some bytes"), "parts of it lie beside it"
    if os.name == "posix":
        assert stat.S_IMODE(uploads.stat().st_mode) == 0o700


def test_the_page_has_the_limit(client: TestClient, uploads: Path) -> None:
    with (uploads / "large").open("wb") as file:
        file.truncate(MOST_BYTES)
    try:
        answer = client.post(ROUTE, files={"files": ("a.trace", b"some bytes")})
    finally:
        (uploads / "large").unlink()
    assert answer.status_code == 413
    assert "no room for this upload" in answer.text


def test_a_size_that_is_not_said_is_refused(tmp_path: Path) -> None:
    app = FastAPI()
    app.post(ROUTE)(lambda: PlainTextResponse("taken"))
    app.add_middleware(UploadLimit, folder=tmp_path, most_bytes=10)
    with TestClient(app, base_url=HOME) as client:
        assert client.post(ROUTE, content=iter([b"12345"])).status_code == 411
        assert client.post(ROUTE, content=b"12345").text == "taken"
        assert client.post(ROUTE, content=b"12345678901").status_code == 413
        (tmp_path / "a").write_bytes(b"123456")
        assert client.post(ROUTE, content=b"12345").status_code == 413


def test_earlier_uploads_are_deleted_and_no_link_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", "elsewhere")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("mine")
    folder = tmp_path / "uploads"
    (folder / LEFT).mkdir(parents=True)
    (folder / LEFT / "b").write_text("b")
    if os.name == "posix":
        (folder / LEFT[::-1]).symlink_to(tmp_path / "mine")
    prepare(folder)
    assert list(folder.iterdir()) == []
    assert (tmp_path / "mine" / "a").read_text() == "mine"
    assert os.environ["GRADIO_TEMP_DIR"] == str(folder.resolve())


@pytest.mark.parametrize("name", ["uploads", "exports", "analysis"])
def test_a_start_in_a_folder_of_the_users_deletes_nothing_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """MOESTRO_HOME may name any folder, also one that has such a folder already."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", "elsewhere")
    thesis = tmp_path / name / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    host = open_host(tmp_path)
    try:
        build(host)
        if name == "analysis":
            assert host.analyst.start(Question(RoutingSource("load", 0), ("lru",))).join(WAIT_S)
    finally:
        host.close()
    assert thesis.read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="Windows has access lists, not modes")
def test_what_is_written_for_the_user_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.cli import write_log
    from core.profile.file import write as write_profile

    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        assert "details are in" in write_log(ValueError("x"))
        host = open_host(tmp_path / "a" / "b")
        chat = ended(host.chats.ask(None, "hello")).chat_id
        write_export(host.store, host.store.folder / "exports" / "x.zip", chat=chat)
        write_trace(find(host.store, chat, None), host.store.folder / "exports" / "x.trace")
        write_profile(host.store.folder / "profiles" / "p.safetensors", "k", {}, {}, 1)
        made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
        open_to_others = {str(path): oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o077}
        host.close()
    finally:
        os.umask(before)
    assert {path.name for path in made} >= {"x.zip", "x.trace", "p.safetensors", "moestro.log"}
    assert open_to_others == {}


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "uploads").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        private_folder(tmp_path / "uploads")
