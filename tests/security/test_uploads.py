"""Uploads stay in the user's data folder, closed to others, limited in all, and do not outlive a start."""

import os
import socket
import stat
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from select import select
from tempfile import NamedTemporaryFile

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse

from app.server.bodies import UPLOAD, Bodies
from app.server.uploads import MOST_BYTES, UploadLimit, bytes_in, prepare
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.exports.archive import write as write_export
from app.services.exports.traces import find
from app.services.exports.traces import write as write_trace
from app.services.host import Host
from app.store.private import private_folder
from app.ui.serve import build
from tests.app.conftest import WAIT_S, ended, open_host
from tests.app.served import eventually, serving
from tests.security.conftest import HOME, LEFT


def test_an_upload_lies_in_the_data_folder(client: TestClient, host: Host, uploads: Path) -> None:
    assert not (uploads / LEFT).exists(), "what an earlier start left is still there"
    before = bytes_in(uploads)
    answer = client.post(UPLOAD, files={"files": ("a.trace", b"some bytes")})
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
        answer = client.post(UPLOAD, files={"files": ("a.trace", b"some bytes")})
    finally:
        (uploads / "large").unlink()
    assert answer.status_code == 413
    assert "no room for this upload" in answer.text


def test_a_size_that_is_not_said_is_refused(tmp_path: Path) -> None:
    app = FastAPI()
    app.post(UPLOAD)(lambda: PlainTextResponse("taken"))
    app.add_middleware(UploadLimit, folder=tmp_path, most_bytes=10)
    app.add_middleware(Bodies)
    with TestClient(app, base_url=HOME) as client:
        assert client.post(UPLOAD, content=iter([b"12345"])).status_code == 411
        assert client.post(UPLOAD, content=b"12345").text == "taken"
        assert client.post(UPLOAD, content=b"12345678901").status_code == 413
        (tmp_path / "a").write_bytes(b"123456")
        assert client.post(UPLOAD, content=b"12345").status_code == 413


def storing(folder: Path, most_bytes: int) -> FastAPI:
    """The limit in front of a route that writes as Gradio does: a file as it arrives, then moved to its own folder."""
    app = FastAPI()

    @app.post(UPLOAD)
    async def store(request: Request) -> None:
        with NamedTemporaryFile(delete=False, dir=folder) as file:
            async for part in request.stream():
                file.write(part)
                file.flush()
        (own := Path(f"{file.name}.whole")).mkdir()
        Path(file.name).rename(own / "file")

    app.add_middleware(UploadLimit, folder=folder, most_bytes=most_bytes)
    app.add_middleware(Bodies)
    return app


def begun(port: int, sent: int, declared: int) -> socket.socket:
    """A connection whose upload has not arrived whole."""
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    client.sendall(f"POST {UPLOAD} HTTP/1.1\r\nhost: x\r\ncontent-length: {declared}\r\n\r\n".encode() + b"x" * sent)
    return client


def status(client: socket.socket) -> int:
    reply = HTTPResponse(client)
    reply.begin()
    return reply.status


def test_uploads_at_the_same_time_stay_below_the_limit_together(tmp_path: Path) -> None:
    with serving(storing(tmp_path, 250)) as port:
        clients = [begun(port, 0, 100) for _ in range(6)]
        eventually(lambda: len(select(clients, [], [], 0)[0]) == 4)  # refused before any of them has sent a byte
        refused = select(clients, [], [], 0)[0]
        assert {status(client) for client in refused} == {413}
        taken = [client for client in clients if client not in refused]
        for client in taken:
            client.sendall(b"x" * 100)
        assert {status(client) for client in taken} == {200}
        assert bytes_in(tmp_path) == 200
        for client in clients:
            client.close()


def test_an_upload_that_breaks_off_gives_its_room_back(tmp_path: Path) -> None:
    (tmp_path / "tmp of the user's.txt").touch()
    with serving(storing(tmp_path, 100)) as port:
        with begun(port, 60, 100):
            eventually(lambda: bytes_in(tmp_path) == 60)
            assert httpx.post(f"http://127.0.0.1:{port}{UPLOAD}", content=b"x").status_code == 413
        eventually(lambda: bytes_in(tmp_path) == 0)
        reply = httpx.post(f"http://127.0.0.1:{port}{UPLOAD}", content=b"x" * 100)
        assert (reply.status_code, bytes_in(tmp_path)) == (200, 100)
        assert httpx.post(f"http://127.0.0.1:{port}{UPLOAD}", content=b"x").status_code == 413
        assert (tmp_path / "tmp of the user's.txt").exists()
        for file in tmp_path.rglob("file"):
            file.unlink()
        assert httpx.post(f"http://127.0.0.1:{port}{UPLOAD}", content=b"x").status_code == 200


@pytest.mark.parametrize("address", [UPLOAD, f"{UPLOAD}?upload_id=x"])
@pytest.mark.parametrize(
    ("boundary", "part"),
    [
        ("b", b'form-data; name="files"'),
        ("b", b"form-data; name=\"files\"; filename*=utf-8''%ff%00"),
        ("b" * 300, b'form-data; name="files"; filename="a"'),
        ("b", b"form-data"),
    ],
)
def test_a_form_that_is_no_upload_is_refused(
    client: TestClient, uploads: Path, address: str, boundary: str, part: bytes
) -> None:
    before, mark = bytes_in(uploads), b"--" + boundary.encode()
    body = mark + b"\r\ncontent-disposition: " + part + b"\r\n\r\nx\r\n" + mark + b"--\r\n"
    reply = client.post(address, content=body, headers={"content-type": f"multipart/form-data; boundary={boundary}"})
    assert reply.status_code == 400, reply.text
    assert bytes_in(uploads) == before


def test_gradio_leaves_nothing_of_an_upload_that_breaks_off(page: FastAPI, uploads: Path) -> None:
    before = bytes_in(uploads)
    part = b'--b\r\ncontent-disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"x" * 100_000
    head = f"POST {UPLOAD} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 200000\r\n"
    with serving(page) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
            client.sendall(f"{head}content-type: multipart/form-data; boundary=b\r\n\r\n".encode() + part)
            eventually(lambda: bytes_in(uploads) > before)
        eventually(lambda: bytes_in(uploads) == before)


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


def test_a_start_in_a_folder_of_the_users_deletes_nothing_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOESTRO_HOME may name any folder, also one that has such folders already."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", "elsewhere")
    theses = [tmp_path / name / "thesis.txt" for name in ("uploads", "exports", "analysis")]
    for thesis in theses:
        thesis.parent.mkdir()
        thesis.write_text("mine")
    with closing(open_host(tmp_path)) as host:
        build(host)
        assert host.analyst.start(Question(RoutingSource("load", 0), ("lru",))).join(WAIT_S)
    assert [thesis.read_text() for thesis in theses] == ["mine"] * 3


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
