"""A hub on this machine: enough of its HTTP interface for huggingface_hub to find, list and fetch models."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest

from core.importing import download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 50_000  # bytes from which a file is kept as large files are: known by its sha256


class FakeHub:
    """Serves directories as `repos`: one, and those of `others`. `cut` = break every connection after so many bytes of
    a large file; `down` = answer 503; `gated` = the repositories whose files are refused; `spoil` = what large files
    are filled with instead; `asked` = what was fetched: (file, first byte)."""

    def __init__(self, directory: Path, repo: str, others: Mapping[str, Path] | None = None) -> None:
        self.repos = {repo: directory, **(others or {})}
        self.gated: set[str] = set()
        self.cut: int | None = None
        self.down = False
        self.spoil = b""
        self.asked: list[tuple[str, int]] = []
        handler = type("Bound", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def listing(self, repo: str) -> list[dict[str, Any]]:
        found, directory = [], self.repos[repo]
        for file in sorted(p for p in directory.rglob("*") if p.is_file()):
            raw = file.read_bytes()
            entry: dict[str, Any] = {
                "rfilename": file.relative_to(directory).as_posix(),
                "size": len(raw),
                "blobId": hashlib.sha1(raw).hexdigest(),
            }
            if len(raw) >= LARGE:
                entry["lfs"] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
            found.append(entry)
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def in_use(server: FakeHub, cache: Path) -> Iterator[FakeHub]:
    """Inside, huggingface_hub has it for the hub, with this cache."""
    constants = huggingface_hub.constants
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(download, "PAUSE", 0.0)
        patch.setattr(download, "CHUNK", 16_384)
        huggingface_hub.close_session()
        yield server
        server.close()
        huggingface_hub.close_session()


class Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, head: bool) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path)
        if hub.down:
            return self.send(503, b"", {})
        if path == "/api/models":
            text = parse_qs(url.query)["search"][0].lower()
            named = [one for one in hub.repos if text in one.lower()]
            return self.json([{"id": one, "downloads": 1234, "gated": one in hub.gated} for one in named])
        for repo, directory in hub.repos.items():
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return self.json({"id": repo, "sha": COMMIT, "siblings": hub.listing(repo)})
            for revision in ("main", COMMIT):
                if path.startswith(prefix := f"/{repo}/resolve/{revision}/"):
                    if repo in hub.gated:
                        return self.send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
                    return self.file(directory / path.removeprefix(prefix), path.removeprefix(prefix), head)
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"})

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def file(self, path: Path, name: str, head: bool) -> None:
        hub, raw = self.hub, path.read_bytes()
        sha = hashlib.sha256(raw).hexdigest() if len(raw) >= LARGE else hashlib.sha1(raw).hexdigest()
        headers = {
            "ETag": f'"{sha}"',
            "X-Linked-ETag": f'"{sha}"',
            "X-Linked-Size": str(len(raw)),
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if head:
            return self.send(200, b"", headers | {"Content-Length": str(len(raw))})
        start, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        first, end = int(start), min(int(last or len(raw)) + 1, len(raw))
        hub.asked.append((name, first))
        if hub.spoil and len(raw) >= LARGE:
            raw = hub.spoil * (len(raw) // len(hub.spoil) + 1)
            raw = raw[: path.stat().st_size]
        body = raw[first:end]
        headers["Content-Length"] = str(len(body))
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(raw)}"
        if hub.cut is not None and len(raw) >= LARGE and len(body) > hub.cut:
            self.send(206 if "Range" in self.headers else 200, body[: hub.cut], headers)
            self.close_connection = True
            return None
        return self.send(206 if "Range" in self.headers else 200, body, headers)

    def send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
